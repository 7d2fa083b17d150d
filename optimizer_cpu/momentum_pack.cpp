// momentum_pack_ on the CPU: one pass over gradients, momentum and the packed batch, tile by tile, by threads that take turns.
//
// The formula of one element is in element.h, the checked arguments are in momentum_pack.h; matrices.h cuts matrices
// into tiles, tiles.h moves a tile between memory and arrays of T.
#include "../optimizer_common/momentum_pack.h"
#include "tiles.h"

namespace optimizer {
namespace {

template <class T>
OPTIMIZER_INLINE void pack(const MomentumPack& call, const Matrix<3>& m, const Box& box) {
  T momentum[kTileArea], update[kTileArea];
  const int64_t size = box.rows * box.cols;
  if (!call.gate.is_open(m.index)) {
    std::fill_n(update, size, T(0));
    return store(update, call.dtypes[kPacked], m.views[kPacked], box);
  }
  const T weight = static_cast<T>(call.weight);
  const T divisor = gradient_divisor<T>(call.grad_scale.get(0, 1), call.maximize);
  load(momentum, call.dtypes[kMomentum], m.views[kMomentum], box);
  load(update, call.dtypes[kGradient], m.views[kGradient], box);
  for (int64_t i = 0; i < size; ++i) {
    const T gradient = update[i] / divisor;
    momentum[i] = lerp(momentum[i], gradient, weight);
    update[i] = call.nesterov ? lerp(momentum[i], gradient, weight) : momentum[i];
  }
  store(momentum, call.dtypes[kMomentum], m.views[kMomentum], box);
  store(update, call.dtypes[kPacked], m.views[kPacked], box);
}

OPTIMIZER_CLONES void pack_in_float(const MomentumPack& call, const Matrix<3>& m, const Box& box) {
  pack<float>(call, m, box);
}

OPTIMIZER_CLONES void pack_in_double(const MomentumPack& call, const Matrix<3>& m, const Box& box) {
  pack<double>(call, m, box);
}

}  // namespace

void momentum_pack_cpu(const MomentumPack& call) {
  const auto pack = call.in_double() ? pack_in_double : pack_in_float;
  for_each_tile(call.matrices, [&](const auto& m, const Box& box) { pack(call, m, box); });
}

}  // namespace optimizer
