// frobenius_norm_ and normalize_ on the CPU: a pass that reads matrices and one that scales and casts them.
//
// The checked arguments are in normalize.h; tiles.h moves tiles. The squares of a tile are summed in kLanes sums, and
// those of all tiles one after another, so that the order follows from a matrix's size alone.
#include "../optimizer_common/normalize.h"
#include "tiles.h"

namespace optimizer {
namespace {

constexpr int64_t kLanes = 16;

// The square of a float is exact in double: whether a compiler contracts this changes no bit, and nothing overflows.
OPTIMIZER_CLONES double sum_of_squares(const Batch& batch, const Matrix<2>& m, const Box& box) {
  float values[kTileArea];
  double sums[kLanes] = {};
  const int64_t size = box.rows * box.cols, whole = size / kLanes * kLanes;
  load(values, batch.dtypes[kGiven], m.views[kGiven], box);
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double x = values[i + lane];
      sums[lane] += x * x;
    }
  }
  for (int64_t i = whole; i < size; ++i) {
    const double x = values[i];
    sums[i - whole] += x * x;
  }
  double sum = 0;
  for (const double lane : sums) {
    sum += lane;
  }
  return sum;
}

OPTIMIZER_CLONES void scale_tile(const Batch& batch, const Matrix<2>& m, const Box& box, float by) {
  float values[kTileArea];
  load(values, batch.dtypes[kGiven], m.views[kGiven], box);
  for (int64_t i = 0; i < box.rows * box.cols; ++i) {
    values[i] *= by;
  }
  store(values, batch.dtypes[kNormalized], m.views[kNormalized], box);
}

// Cut by the size of a matrix alone, not by where its elements are.
Batch cut_by_size(Batch batch) {
  cut(batch.first, true);
  return batch;
}

// Calls work(matrix, box, tile of all) for each tile.
template <class Work>
void for_each(const Batch& batch, const Work& work) {
  share_tiles(batch.tiles(), [&](const Range& some) {
    for (int64_t tile = some.begin; tile < some.end; ++tile) {
      const Matrix<2> m = batch.matrix_of_tile(tile);
      work(m, tile_box(m, tile), tile);
    }
  });
}

}  // namespace

void frobenius_norm_cpu(const FrobeniusNorm& call) {
  const Batch batch = cut_by_size(call.batch);
  double* const norms = static_cast<double*>(call.norms.mutable_data_ptr());
  std::vector<double> sums(batch.tiles());
  std::fill_n(norms, call.norms.numel(), 0.0);
  for_each(batch, [&](const auto& m, const Box& box, int64_t tile) { sums[tile] = sum_of_squares(batch, m, box); });
  for (int64_t tile = 0; tile < batch.tiles(); ++tile) {
    norms[batch.matrix_of_tile(tile).index] += sums[tile];
  }
  for (int64_t i = 0; i < call.norms.numel(); ++i) {
    norms[i] = std::sqrt(norms[i]);
  }
}

void normalize_cpu(const Normalize& call) {
  const Batch batch = cut_by_size(call.batch);
  for_each(batch, [&](const auto& m, const Box& box, int64_t) {
    scale_tile(batch, m, box, multiplier_of(call.norms[m.index], call.eps, call.scale));
  });
}

}  // namespace optimizer
