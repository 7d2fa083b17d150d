// Squares on the GPU, summed in an order that follows from a matrix's size alone: the pass that reads a matrix and the
// one that makes it give its norm the same bits.
//
// A block sums the squares of a square tile in shared memory, along the lines that `Matrix::squares` names. Then a
// block for each matrix adds what its tiles have, tile by tile along those lines.
#pragma once

#include "tiles.cuh"

namespace optimizer {

// Memory for the sums of this many tiles of all matrices, where `norms` is.
Tensor tile_sums(const Tensor& norms, int64_t tiles);

// Writes the norm of each matrix: the root of what its tiles' sums add up to.
void norms_of_tiles(const Tensor& norms, const Tensor& sums, int32_t device);

// The sum of what all threads of a block have, in one order; thread 0 gets it.
__device__ inline double sum_of_block(double one) {
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = one;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      sums[threadIdx.x] += sums[threadIdx.x + half];
    }
  }
  return sums[threadIdx.x];
}

// Adds the second half of the sums to the first, and so on until one is left. Each number has its function, because
// the compiler keeps them in registers only if it knows every place.
template <int kHalf>
__device__ void add_halves(double (&sums)[kTileSide]) {
#pragma unroll
  for (int at = 0; at < kHalf; ++at) {
    sums[at] += sums[at + kHalf];
  }
  if constexpr (kHalf > 1) {
    add_halves<kHalf / 2>(sums);
  }
}

// The sum of the squares of one row of a tile, by one thread, in the order in which a block adds those of a tile with
// one row.
__device__ inline double sum_of_line(const float (&row)[kTileSide + 1], int length) {
  double sums[kTileSide];
#pragma unroll
  for (int at = 0; at < kTileSide; ++at) {
    const double x = at < length ? row[at] : 0.0f;
    sums[at] = x * x;
  }
  add_halves<kTileSide / 2>(sums);
  return sums[0];
}

// The calling thread's part of a tile's squares, of its elements as this dtype stores them. The square of a float is
// exact in double: whether a compiler contracts this changes no bit, and nothing overflows.
template <class T>
__device__ double sum_of_thread(const Exchange<T>& tile, ScalarType dtype, int lines, int length, bool by_columns) {
  double sum = 0;
  const int at = threadIdx.x % kTileSide;
  with_stored(dtype, [&](auto stored) {
    for (int line = threadIdx.x / kTileSide; at < length && line < lines; line += kThreads / kTileSide) {
      const T value = by_columns ? tile[at][line] : tile[line][at];
      const double x = widen<float>(narrow<decltype(stored)>(value));
      sum += x * x;
    }
  });
  return sum;
}

// Writes the sum of a tile's squares to the place that it has among those of all matrices, which have one size. A
// barrier must lie behind the last element that any thread has written to the tile.
template <int N, class T>
__device__ void write_tile_sum(double* sums, const Exchange<T>& tile, ScalarType dtype, const Matrix<N>& m,
                               const Box& box) {
  const bool by_columns = m.squares == Squares::kByColumns;
  const int64_t down = ceil_div(m.rows, kTileSide), across = ceil_div(m.cols, kTileSide);
  const int64_t row = box.row / kTileSide, col = box.col / kTileSide;
  const int64_t place = by_columns ? col * down + row : row * across + col;
  const int lines = by_columns ? box.cols : box.rows, length = by_columns ? box.rows : box.cols;
  const double sum = sum_of_block(sum_of_thread(tile, dtype, lines, length, by_columns));
  if (threadIdx.x == 0) {
    sums[m.index * down * across + place] = sum;
  }
}

// Launches a pass by launch(). Where norms are wanted, it has memory for the sums of its tiles, and what makes norms of
// these follows.
template <class Call, class Launch, class Work>
void launch_with_norms(const Call& call, Launch& parameters, const Work& launch) {
  if (!call.norms) {
    return launch();
  }
  int64_t tiles = 0;
  for (const auto& m : call.matrices) {
    tiles += ceil_div(m.rows, kTileSide) * ceil_div(m.cols, kTileSide);
  }
  const Tensor sums = tile_sums(*call.norms, tiles);
  parameters.sums = static_cast<double*>(sums.mutable_data_ptr());
  launch();
  norms_of_tiles(*call.norms, sums, call.device);
}

}  // namespace optimizer
