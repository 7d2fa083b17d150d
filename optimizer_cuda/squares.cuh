// Squares on the GPU, summed in an order that follows from a matrix's size alone: the pass that reads a matrix and the
// one that makes it give its norm the same bits.
//
// The thread that has a chunk of a square tile, along the lines that `Matrix::squares` names, adds its squares one by
// one; if it has two, it goes on with the second from the sum of the first. A block adds what its threads have. Then a
// block for each matrix adds what its tiles have, tile by tile along those lines.
#pragma once

#include "exchange.cuh"

namespace optimizer {

// Memory for the sums of this many tiles of all matrices, where `norms` is.
Tensor tile_sums(const Tensor& norms, int64_t tiles);

// Writes the norm of each matrix: the root of what its tiles' sums add up to.
void norms_of_tiles(const Tensor& norms, const Tensor& sums, int32_t device);

// The sum of what all threads of a block have, in one order; thread 0 gets it.
__device__ inline double sum_of_block(double one) {
  constexpr int kSums = 16;
  __shared__ double ones[kThreads], sums[kSums];
  ones[threadIdx.x] = one;
  __syncthreads();
  if (threadIdx.x < kSums) {
    double sum = 0;
#pragma unroll
    for (int i = threadIdx.x; i < kThreads; i += kSums) {
      sum += ones[i];
    }
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sum += sums[i];
    }
  }
  return sum;
}

// Adds to `sum` the squares of `count` elements as a tensor of this dtype stores them. The square of a float is exact
// in double: whether a compiler contracts this changes no bit, and nothing overflows.
template <class T>
__device__ double add_squares(double sum, const T (&values)[kChunk], int count, ScalarType dtype) {
  with_stored_for<T>(dtype, [&](auto stored) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const double x = i < count ? widen<float>(narrow<decltype(stored)>(values[i])) : 0.0f;
      sum += x * x;
    }
  });
  return sum;
}

__device__ inline bool sums_along_rows(Squares squares) { return squares == Squares::kByRows; }

// The calling thread's part of the squares of a tile in shared memory, after a barrier.
template <class T>
__device__ double squares_of_tile(const Exchange<T>& tile, ScalarType dtype, Squares squares, const Box& box) {
  double sum = 0;
  for_each_chunk_of_tile(box, sums_along_rows(squares), [&](const Chunk& at, int) {
    T values[kChunk];
    from_tile(values, tile, at);
    sum = add_squares(sum, values, at.count, dtype);
  });
  return sum;
}

// Calls work(chunk, values) on the calling thread's chunks of a tile, which sets the values. Returns the thread's part
// of their squares, if these are wanted: of values in registers, unless squares are summed along the other lines.
template <class T, class Work>
__device__ double squares_of_chunks(Exchange<T>& tile, ScalarType dtype, Squares squares, const Box& box,
                                    bool along_rows, const Work& work) {
  const bool wanted = squares != Squares::kUnused, in_registers = sums_along_rows(squares) == along_rows;
  double sum = 0;
  for_each_chunk_of_tile(box, along_rows, [&](const Chunk& chunk, int) {
    T values[kChunk];
    work(chunk, values);
    if (wanted && in_registers) {
      sum = add_squares(sum, values, chunk.count, dtype);
    } else if (wanted) {
      to_tile(tile, values, chunk);
    }
  });
  if (wanted && !in_registers) {
    __syncthreads();
    sum = squares_of_tile(tile, dtype, squares, box);
  }
  return sum;
}

// The sum of the squares of one row of a tile, by one thread, in the order in which a block adds those of a tile with
// one row: there each chunk has a thread.
__device__ inline double sum_of_row(const float (&row)[kTileSide + 1], int length) {
  double sum = 0;
  for (int at = 0; at < length; at += kChunk) {
    double of_chunk = 0;
    for (int i = at; i < min(at + kChunk, length); ++i) {
      const double x = row[i];
      of_chunk += x * x;
    }
    sum += of_chunk;
  }
  return sum;
}

// Writes the sum of a tile's squares, of which each thread has a part, to the place that it has among those of all
// matrices, which have one size.
template <int N>
__device__ void write_tile_sum(double* sums, double of_thread, const Matrix<N>& m, const Box& box) {
  const int64_t row = box.row / kTileSide, col = box.col / kTileSide, down = ceil_div(m.rows, kTileSide);
  const int64_t place = sums_along_rows(m.squares) ? row * m.tiles_across + col : col * down + row;
  const double sum = sum_of_block(of_thread);
  if (threadIdx.x == 0) {
    sums[m.index * m.tiles + place] = sum;
  }
}

// Launches a pass by launch(). Where norms are wanted, the pass writes the sums of its tiles to new memory, and another
// launch makes norms of these sums.
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
