// frobenius_norm_ and normalize_ on the CPU: a pass that reads matrices and one that scales and casts them.
//
// The checked arguments are in normalize.h; tiles.h moves tiles, and squares.h sums squares.
#include "../optimizer_common/normalize.h"
#include "squares.h"

namespace optimizer {
namespace {

// `first` is the number of the tile's matrix or, for norms of rows, that of the matrix's first row.
OPTIMIZER_CLONES void take_squares(UnitSums& sums, int64_t first, const Batch& batch, const Matrix<2>& m,
                                   const Box& box) {
  sums.take(first, batch.dtypes[kGiven], m.views[kGiven], box);
}

OPTIMIZER_CLONES void scale_tile(const Normalize& call, const Matrix<2>& m, const Box& box) {
  float values[kTileArea];
  load(values, call.batch.dtypes[kGiven], m.views[kGiven], box);
  // Where a norm stands for a matrix, all of the tile is one row here.
  const int64_t rows = call.of_rows ? box.rows : 1, length = box.rows * box.cols / rows;
  const double* const norms = call.norms + (call.of_rows ? m.index * m.rows + box.row : m.index);
  for (int64_t r = 0; r < rows; ++r) {
    const float by = multiplier_of(norms[r], call.eps, call.scale);
    for (int64_t i = 0; i < length; ++i) {
      values[r * length + i] *= by;
    }
  }
  store(values, call.batch.dtypes[kNormalized], m.views[kNormalized], box);
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
  const int64_t rows = batch.first.rows, of_matrix = call.of_rows ? rows : 1;  // norms
  UnitSums sums(call.norms.numel(), call.of_rows ? 1 : rows, batch.first.cols);
  collapse_whole_units(batch.first);
  cut(batch.first, rows_are_runs(batch.first));
  for_each(batch, [&](const auto& m, const Box& box) { take_squares(sums, m.index * of_matrix, batch, m, box); });
  sums.write_norms(static_cast<double*>(call.norms.mutable_data_ptr()));
}

void normalize_cpu(const Normalize& call) {
  Batch batch = call.batch;
  if (!call.of_rows) {
    simplify(batch.first);
  }
  cut(batch.first, rows_are_runs(batch.first));
  for_each(batch, [&](const auto& m, const Box& box) { scale_tile(call, m, box); });
}

}  // namespace optimizer
