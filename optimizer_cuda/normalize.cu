// frobenius_norm_ and normalize_ on the GPU: a pass that reads a batch, and one that scales and casts it.
//
// The checked arguments are in normalize.h. A batch is one launch, a block for each square tile, which it brings to
// shared memory. squares.cuh sums its squares. Matrices of one row are the lines of larger ones: a block takes as many
// of them as a tile has rows, and gives each the bits that it has alone.
#include "../optimizer_common/normalize.h"
#include "squares.cuh"

#include <torch/csrc/stable/ops.h>

namespace optimizer {
namespace {

struct SquaresLaunch {
  Batch batch;
  double* sums;  // of each tile
  int64_t count;
};

struct RootsLaunch {
  const double* sums;
  int64_t tiles;  // of a matrix
  double* norms;
  int64_t count;
};

struct NormalizeLaunch {
  Batch batch;
  const double* norms;
  double eps, scale;
  int64_t count;
};

template <class Stored>
__device__ Stored& element(const View& view, const Box& box, int row, int col) {
  const int64_t place = (box.row + row) * view.row_stride + (box.col + col) * view.col_stride;
  return reinterpret_cast<Stored*>(view.data)[place];
}

// The dtype is looked at before the loop, and all elements of a thread are loaded before one is stored: a load behind a
// store would wait for it, as it might be of the same place for all that the compiler knows.
__device__ void load_tile(Exchange<float>& tile, const Batch& batch, const Matrix<2>& m, const Box& box) {
  const View& view = m.views[kGiven];
  float values[kPlaces];
  with_stored(batch.dtypes[kGiven], [&](auto stored) {
    for_each_place(box, view, [&](int row, int col, int i) {
      values[i] = widen<float>(element<decltype(stored)>(view, box, row, col));
    });
  });
  for_each_place(box, view, [&](int row, int col, int i) { tile[row][col] = values[i]; });
  __syncthreads();
}

// Stores each element times by(row).
template <class By>
__device__ void store_tile(const Exchange<float>& tile, const By& by, const Batch& batch, const Matrix<2>& m,
                           const Box& box) {
  with_stored(batch.dtypes[kNormalized], [&](auto stored) {
    using Stored = decltype(stored);
    for_each_place(box, m.views[kNormalized], [&](int row, int col, int) {
      element<Stored>(m.views[kNormalized], box, row, col) = narrow<Stored>(tile[row][col] * by(row));
    });
  });
}

__global__ void __launch_bounds__(kThreads) sum_squares(const __grid_constant__ SquaresLaunch call) {
  __shared__ Exchange<float> tile;
  const Matrix<2> m = call.batch.matrix_of_tile(blockIdx.x);
  const Box box = tile_box(m, blockIdx.x);
  load_tile(tile, call.batch, m, box);
  write_tile_sum(call.sums, tile, ScalarType::Float, m, box);
}

__global__ void __launch_bounds__(kThreads) take_roots(const __grid_constant__ RootsLaunch call) {
  double sum = 0;
  for (int64_t tile = threadIdx.x; tile < call.tiles; tile += kThreads) {
    sum += call.sums[blockIdx.x * call.tiles + tile];
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) {
    call.norms[blockIdx.x] = sqrt(sum);
  }
}

__global__ void __launch_bounds__(kThreads) scale_tiles(const __grid_constant__ NormalizeLaunch call) {
  __shared__ Exchange<float> tile;
  const Matrix<2> m = call.batch.matrix_of_tile(blockIdx.x);
  const Box box = tile_box(m, blockIdx.x);
  load_tile(tile, call.batch, m, box);
  const float by = multiplier_of(call.norms[m.index], call.eps, call.scale);
  store_tile(tile, [&](int) { return by; }, call.batch, m, box);
}

__global__ void __launch_bounds__(kThreads) sum_lines(const __grid_constant__ SquaresLaunch call) {
  __shared__ Exchange<float> tile;
  const Matrix<2> m = call.batch.matrix_of_tile(blockIdx.x);
  const Box box = tile_box(m, blockIdx.x);
  load_tile(tile, call.batch, m, box);
  const int line = threadIdx.x;
  if (line < box.rows) {
    const int64_t across = ceil_div(m.cols, kTileSide);
    call.sums[(box.row + line) * across + box.col / kTileSide] = sum_of_line(tile[line], box.cols);
  }
}

__global__ void __launch_bounds__(kThreads) scale_lines(const __grid_constant__ NormalizeLaunch call) {
  __shared__ Exchange<float> tile;
  __shared__ float by[kTileSide];
  const Matrix<2> m = call.batch.matrix_of_tile(blockIdx.x);
  const Box box = tile_box(m, blockIdx.x);
  if (threadIdx.x < box.rows) {
    by[threadIdx.x] = multiplier_of(call.norms[box.row + threadIdx.x], call.eps, call.scale);
  }
  load_tile(tile, call.batch, m, box);  // with a barrier
  store_tile(tile, [&](int row) { return by[row]; }, call.batch, m, box);
}

bool has_lines(const Batch& batch) { return batch.first.rows == 1 && batch.count > 1; }

// Cut into square tiles: of each matrix, or, if they are lines, of the one matrix that they are together.
Batch cut_squarely(Batch batch) {
  if (has_lines(batch)) {
    batch.first.rows = batch.count;
    for (int k = 0; k < 2; ++k) {
      batch.first.views[k].row_stride = batch.steps[k] / element_size(batch.dtypes[k]);
    }
    batch.count = 1;
  }
  cut(batch.first, false);
  return batch;
}

}  // namespace

Tensor tile_sums(const Tensor& norms, int64_t tiles) {
  return torch::stable::new_empty(norms, {tiles});
}

void norms_of_tiles(const Tensor& norms, const Tensor& sums, int32_t device) {
  const int64_t matrices = norms.numel();
  if (matrices == 0) {
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(device);
  launch(take_roots,
         RootsLaunch{static_cast<const double*>(sums.const_data_ptr()), sums.numel() / matrices,
                     static_cast<double*>(norms.mutable_data_ptr()), matrices},
         matrices, device);
}

void frobenius_norm_cuda(const FrobeniusNorm& call) {
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  const Batch batch = cut_squarely(call.batch);
  const int64_t across = ceil_div(batch.first.cols, kTileSide);
  const Tensor sums = tile_sums(call.norms, has_lines(call.batch) ? call.batch.count * across : batch.tiles());
  if (batch.tiles() > 0) {
    const SquaresLaunch parameters{batch, static_cast<double*>(sums.mutable_data_ptr()), call.batch.count};
    launch(has_lines(call.batch) ? sum_lines : sum_squares, parameters, batch.tiles(), call.device);
  }
  norms_of_tiles(call.norms, sums, call.device);
}

void normalize_cuda(const Normalize& call) {
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  const Batch batch = cut_squarely(call.batch);
  if (batch.tiles() > 0) {
    const NormalizeLaunch parameters{batch, call.norms, call.eps, call.scale, call.batch.count};
    launch(has_lines(call.batch) ? scale_lines : scale_tiles, parameters, batch.tiles(), call.device);
  }
}

}  // namespace optimizer
