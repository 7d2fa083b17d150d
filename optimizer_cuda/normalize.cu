// frobenius_norm_ and normalize_ on the GPU: a pass that reads a batch, and one that scales and casts it.
//
// The checked arguments are in normalize.h. A batch is one launch, a block for each square tile. To sum squares a block
// brings its tile to shared memory (squares.cuh); to scale, only where the tensors do not both lie in chunks along the
// same lines. The norm of a row has the bits that it has where the row is a matrix of its own.
#include "../optimizer_common/normalize.h"
#include "squares.cuh"

#include <torch/csrc/stable/ops.h>

namespace optimizer {
namespace {

// A batch cut into square tiles, and how its tensors lie; as in an Entry.
struct TiledBatch : Batch {
  bool in_chunks[2], is_direct;
};

struct SquaresLaunch {
  TiledBatch batch;
  double* sums;  // of each tile, or of each row of it
  int64_t count;
};

struct RootsLaunch {
  const double* sums;
  int64_t tiles;  // that a norm is of
  double* norms;
  int64_t count;
};

struct NormalizeLaunch {
  TiledBatch batch;
  const double* norms;
  double eps, scale;
  int64_t count;
};

__device__ void load_given(Exchange<float>& tile, const TiledBatch& batch, const Matrix<2>& m, const Box& box) {
  load_tile(tile, m.views[kGiven], batch.dtypes[kGiven], box, batch.in_chunks[kGiven]);
  __syncthreads();
}

// Stores each element times by(row), in the dtype of the result.
template <class By>
__device__ void scale(Exchange<float>& tile, const By& by, const TiledBatch& batch, const Matrix<2>& m,
                      const Box& box) {
  if (!batch.is_direct) {
    load_given(tile, batch, m, box);
    const auto scaled = [&](int row, int col) { return tile[row][col] * by(row); };
    return store_tile<float>(scaled, m.views[kNormalized], batch.dtypes[kNormalized], box,
                             batch.in_chunks[kNormalized]);
  }
  for_each_chunk_of_tile(box, lies_along_rows(m.views[kGiven]), [&](const Chunk& at, int) {
    const auto place = [&](int k) { return address(m.views[k], batch.dtypes[k], box.row + at.row, box.col + at.col); };
    float values[kChunk];
    load(values, batch.dtypes[kGiven], place(kGiven), at.count, true);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      values[i] *= by(at.row_of(i));
    }
    store(values, batch.dtypes[kNormalized], place(kNormalized), at.count, true);
  });
}

__global__ void __launch_bounds__(kThreads) sum_squares(const __grid_constant__ SquaresLaunch call) {
  __shared__ Exchange<float> tile;
  const Matrix<2> m = call.batch.matrix_of_tile(blockIdx.x);
  const Box box = tile_box(m, blockIdx.x);
  load_given(tile, call.batch, m, box);
  write_tile_sum(call.sums, squares_of_tile(tile, ScalarType::Float, m.squares, box), m, box);
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
  const float by = multiplier_of(call.norms[m.index], call.eps, call.scale);
  scale(tile, [&](int) { return by; }, call.batch, m, tile_box(m, blockIdx.x));
}

__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ SquaresLaunch call) {
  __shared__ Exchange<float> tile;
  const Matrix<2> m = call.batch.matrix_of_tile(blockIdx.x);
  const Box box = tile_box(m, blockIdx.x);
  load_given(tile, call.batch, m, box);
  const int row = threadIdx.x;
  if (row < box.rows) {
    const int64_t number = m.index * m.rows + box.row + row;
    call.sums[number * m.tiles_across + box.col / kTileSide] = sum_of_row(tile[row], box.cols);
  }
}

__global__ void __launch_bounds__(kThreads) scale_rows(const __grid_constant__ NormalizeLaunch call) {
  __shared__ Exchange<float> tile;
  __shared__ float by[kTileSide];
  const Matrix<2> m = call.batch.matrix_of_tile(blockIdx.x);
  const Box box = tile_box(m, blockIdx.x);
  if (threadIdx.x < box.rows) {
    by[threadIdx.x] = multiplier_of(call.norms[m.index * m.rows + box.row + threadIdx.x], call.eps, call.scale);
  }
  __syncthreads();
  scale(tile, [&](int row) { return by[row]; }, call.batch, m, box);
}

TiledBatch cut_squarely(const Batch& batch) {
  TiledBatch tiled{batch};
  cut(tiled.first, false);
  for (int k = 0; k < 2; ++k) {
    const bool matrices_too = tiled.count == 1 || tiled.steps[k] % kAccess == 0;
    tiled.in_chunks[k] = matrices_too && lies_in_chunks(tiled.first, k, tiled.dtypes);
  }
  tiled.is_direct = lies_directly(tiled.first, tiled.in_chunks);
  return tiled;
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
  const TiledBatch batch = cut_squarely(call.batch);
  const int64_t of_rows = batch.count * batch.first.rows * batch.first.tiles_across;
  const Tensor sums = tile_sums(call.norms, call.of_rows ? of_rows : batch.tiles());
  if (batch.tiles() > 0) {
    const SquaresLaunch parameters{batch, static_cast<double*>(sums.mutable_data_ptr()), batch.count};
    launch(call.of_rows ? sum_rows : sum_squares, parameters, batch.tiles(), call.device);
  }
  norms_of_tiles(call.norms, sums, call.device);
}

void normalize_cuda(const Normalize& call) {
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  const TiledBatch batch = cut_squarely(call.batch);
  if (batch.tiles() > 0) {
    const NormalizeLaunch parameters{batch, call.norms, call.eps, call.scale, batch.count};
    launch(call.of_rows ? scale_rows : scale_tiles, parameters, batch.tiles(), call.device);
  }
}

}  // namespace optimizer
