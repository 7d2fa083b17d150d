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
OPTIMIZER_CLONES double sum_of_squares(const Normalize& call, const Matrix<2>& m, const Box& box) {
  float values[kTileArea];
  double sums[kLanes] = {};
  const int64_t size = box.rows * box.cols, whole = size / kLanes * kLanes;
  load(values, call.dtypes[kGiven], m.views[kGiven], box);
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

OPTIMIZER_CLONES void scale_tile(const Normalize& call, const Matrix<2>& m, const Box& box) {
  float values[kTileArea];
  const float by = multiplier_of(call.norms[m.index], call);
  load(values, call.dtypes[kGiven], m.views[kGiven], box);
  for (int64_t i = 0; i < box.rows * box.cols; ++i) {
    values[i] *= by;
  }
  store(values, call.dtypes[kNormalized], m.views[kNormalized], box);
}

// Calls work(matrix, tile of all) for each tile.
template <class Work>
void for_each(const Normalize& call, const Work& work) {
  if (call.matrices.empty()) {
    return;
  }
  const int64_t each = tile_count(call.matrices[0]);
  share_tiles(each * call.matrices.size(), [&](const Range& some) {
    for (int64_t tile = some.begin; tile < some.end; ++tile) {
      work(call.matrices[tile / each], tile);
    }
  });
}

}  // namespace

void frobenius_norm_cpu(const Normalize& call) {
  const int64_t each = call.matrices.empty() ? 0 : tile_count(call.matrices[0]);
  std::vector<double> sums(each * call.matrices.size());
  std::fill_n(call.norms, call.count, 0.0);
  for_each(call, [&](const auto& m, int64_t tile) { sums[tile] = sum_of_squares(call, m, tile_box(m, tile)); });
  for (const auto& m : call.matrices) {
    double sum = 0;
    for (int64_t tile = 0; tile < each; ++tile) {
      sum += sums[m.first_tile + tile];
    }
    call.norms[m.index] = std::sqrt(sum);
  }
}

void normalize_cpu(const Normalize& call) {
  for_each(call, [&](const auto& m, int64_t tile) { scale_tile(call, m, tile_box(m, tile)); });
}

}  // namespace optimizer
