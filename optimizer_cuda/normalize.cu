// frobenius_norm_ and normalize_ on the GPU: a pass that reads a batch, and one that scales and casts it.
//
// The checked arguments are in normalize.h. A batch is one launch, a block for each square tile, which it brings to
// shared memory. From there squares are summed by rows, however the matrix lies, and then a block for each matrix sums
// what its tiles have: the order follows from a matrix's size alone.
#include "../optimizer_common/normalize.h"
#include "tiles.cuh"

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

__device__ void load_tile(Exchange<float>& tile, const Batch& batch, const Matrix<2>& m, const Box& box) {
  const ScalarType dtype = batch.dtypes[kGiven];
  for_each_place(box, m.views[kGiven], [&](int row, int col) {
    tile[row][col] = load_one<float>(dtype, address(m.views[kGiven], dtype, box.row + row, box.col + col));
  });
  __syncthreads();
}

// The sum of what all threads of a block have, in one order; thread 0 gets it.
__device__ double sum_of_block(double one) {
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

// The square of a float is exact in double: whether a compiler contracts this changes no bit, and nothing overflows.
__global__ void __launch_bounds__(kThreads) sum_squares(const __grid_constant__ SquaresLaunch call) {
  __shared__ Exchange<float> tile;
  const Matrix<2> m = call.batch.matrix_of_tile(blockIdx.x);
  const Box box = tile_box(m, blockIdx.x);
  load_tile(tile, call.batch, m, box);
  double sum = 0;
  const int col = threadIdx.x % kTileSide;
  for (int row = threadIdx.x / kTileSide; row < box.rows; row += kThreads / kTileSide) {
    const double x = col < box.cols ? tile[row][col] : 0;
    sum += x * x;
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) {
    call.sums[blockIdx.x] = sum;
  }
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
  const ScalarType dtype = call.batch.dtypes[kNormalized];
  for_each_place(box, m.views[kNormalized], [&](int row, int col) {
    store_one(tile[row][col] * by, dtype, address(m.views[kNormalized], dtype, box.row + row, box.col + col));
  });
}

Batch cut_squarely(Batch batch) {
  cut(batch.first, false);
  return batch;
}

}  // namespace

void frobenius_norm_cuda(const FrobeniusNorm& call) {
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  const Batch batch = cut_squarely(call.batch);
  if (call.norms.numel() == 0) {
    return;
  }
  const Tensor sums = torch::stable::new_empty(call.norms, {batch.tiles()});
  auto* const of_tiles = static_cast<double*>(sums.mutable_data_ptr());
  auto* const norms = static_cast<double*>(call.norms.mutable_data_ptr());
  if (batch.tiles() > 0) {
    launch(sum_squares, SquaresLaunch{batch, of_tiles, batch.count}, batch.tiles(), call.device);
  }
  const int64_t matrices = call.norms.numel();  // of which empty ones have no tile
  launch(take_roots, RootsLaunch{of_tiles, batch.tiles() / matrices, norms, matrices}, matrices, call.device);
}

void normalize_cuda(const Normalize& call) {
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  const Batch batch = cut_squarely(call.batch);
  if (batch.tiles() > 0) {
    launch(scale_tiles, NormalizeLaunch{batch, call.norms, call.eps, call.scale, batch.count}, batch.tiles(), call.device);
  }
}

}  // namespace optimizer
