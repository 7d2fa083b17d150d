// frobenius_norm_ and normalize_ on the CPU: a pass that reads matrices and one that scales and casts them.
//
// The checked arguments are in normalize.h; tiles.h moves tiles, and squares.h sums squares.
#include "../optimizer_common/normalize.h"
#include "squares.h"

namespace optimizer {
namespace {

OPTIMIZER_CLONES void take_squares(UnitSums& sums, const Batch& batch, const Matrix<2>& m, const Box& box) {
  sums.take(m.index, batch.dtypes[kGiven], m.views[kGiven], box);
}

OPTIMIZER_CLONES void scale_tile(const Batch& batch, const Matrix<2>& m, const Box& box, float by) {
  float values[kTileArea];
  load(values, batch.dtypes[kGiven], m.views[kGiven], box);
  for (int64_t i = 0; i < box.rows * box.cols; ++i) {
    values[i] *= by;
  }
  store(values, batch.dtypes[kNormalized], m.views[kNormalized], box);
}

// Calls work(matrix, box) for each tile.
template <class Work>
void for_each(const Batch& batch, const Work& work) {
  share_tiles(batch.tiles(), [&](const Range& some) {
    for (int64_t tile = some.begin; tile < some.end; ++tile) {
      const Matrix<2> m = batch.matrix_of_tile(tile);
      work(m, tile_box(m, tile));
    }
  });
}

}  // namespace

void frobenius_norm_cpu(const FrobeniusNorm& call) {
  Batch batch = call.batch;
  UnitSums sums(call.norms.numel(), batch.first.rows, batch.first.cols);
  collapse_whole_units(batch.first);
  cut(batch.first, rows_are_runs(batch.first));
  for_each(batch, [&](const auto& m, const Box& box) { take_squares(sums, batch, m, box); });
  sums.write_norms(static_cast<double*>(call.norms.mutable_data_ptr()));
}

void normalize_cpu(const Normalize& call) {
  Batch batch = call.batch;
  simplify(batch.first);
  cut(batch.first, rows_are_runs(batch.first));
  for_each(batch, [&](const auto& m, const Box& box) {
    scale_tile(batch, m, box, multiplier_of(call.norms[m.index], call.eps, call.scale));
  });
}

}  // namespace optimizer
