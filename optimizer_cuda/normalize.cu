// frobenius_norm_ and normalize_ on the GPU: a pass that reads a batch, and one that scales and casts it.
//
// The checked arguments are in normalize.h. A batch is one launch, a block for each square tile, which it brings to
// shared memory. squares.cuh sums its squares.
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

__device__ void store_tile(const Exchange<float>& tile, float by, const Batch& batch, const Matrix<2>& m,
                           const Box& box) {
  with_stored(batch.dtypes[kNormalized], [&](auto stored) {
    using Stored = decltype(stored);
    for_each_place(box, m.views[kNormalized], [&](int row, int col, int) {
      element<Stored>(m.views[kNormalized], box, row, col) = narrow<Stored>(tile[row][col] * by);
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
  store_tile(tile, multiplier_of(call.norms[m.index], call.eps, call.scale), call.batch, m, box);
}

Batch cut_squarely(Batch batch) {
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
  const Tensor sums = tile_sums(call.norms, batch.tiles());
  if (batch.tiles() > 0) {
    auto* const of_tiles = static_cast<double*>(sums.mutable_data_ptr());
    launch(sum_squares, SquaresLaunch{batch, of_tiles, batch.count}, batch.tiles(), call.device);
  }
  norms_of_tiles(call.norms, sums, call.device);
}

void normalize_cuda(const Normalize& call) {
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  const Batch batch = cut_squarely(call.batch);
  if (batch.tiles() > 0) {
    launch(scale_tiles, NormalizeLaunch{batch, call.norms, call.eps, call.scale, batch.count}, batch.tiles(), call.device);
  }
}

}  // namespace optimizer
