// momentum_pack_ on the CPU: one pass over gradients, momentum and the packed batch, tile by tile, by threads that take
// turns.
//
// The formula of one element is in element.h, that of momentum in 8 bits in quantize.h, the checked arguments are in
// momentum_pack.h; matrices.h cuts matrices into tiles, tiles.h moves a tile between memory and arrays of T, squares.h
// sums squares.
#include "../optimizer_common/momentum_pack.h"
#include "squares.h"

namespace optimizer {
namespace {

// Calls work(block, count, scale) on each block of a box of T, row by row.
template <class T, class Work>
OPTIMIZER_INLINE void for_each_block(T* values, const View& scales, const Box& box, const Work& work) {
  for (int64_t r = 0; r < box.rows; ++r) {
    for (int64_t c = 0; c < box.cols; c += kMomentumBlock) {
      T* const block = values + r * box.cols + c;
      work(block, std::min(kMomentumBlock, box.cols - c), scale_of(scales, box.row + r, box.col + c));
    }
  }
}

template <class T>
OPTIMIZER_INLINE void load_momentum(T* momentum, const MomentumPack& call, const Matrix<3>& m, const Box& box) {
  if (call.scales.empty()) {
    return load(momentum, call.dtypes[kMomentum], m.views[kMomentum], box);
  }
  load_rows<T, int8_t>(momentum, m.views[kMomentum], box);
  const auto values = [](T* block, int64_t count, const float* scale) __attribute__((always_inline)) {
    const T by = *scale;
    for (int64_t i = 0; i < count; ++i) {
      block[i] = dequantize(block[i], by);
    }
  };
  for_each_block(momentum, call.scales[m.index], box, values);
}

template <class T>
OPTIMIZER_INLINE void store_momentum(T* momentum, const MomentumPack& call, const Matrix<3>& m, const Box& box) {
  if (call.scales.empty()) {
    return store(momentum, call.dtypes[kMomentum], m.views[kMomentum], box);
  }
  const auto codes = [](T* block, int64_t count, float* scale) __attribute__((always_inline)) {
    Magnitude<T> largest = 0;
    for (int64_t i = 0; i < count; ++i) {
      largest = std::max(largest, magnitude(block[i]));
    }
    const T by = *scale = make_scale<T>(largest);
    for (int64_t i = 0; i < count; ++i) {
      block[i] = quantize(block[i], by);
    }
  };
  for_each_block(momentum, call.scales[m.index], box, codes);
  store_rows<T, int8_t>(momentum, m.views[kMomentum], box);
}

// Averages the gradients of a box into its momentum; `update` gets what is packed.
template <class T>
OPTIMIZER_INLINE void average(T* update, const MomentumPack& call, const Matrix<3>& m, const Box& box) {
  T momentum[kTileArea];
  const T weight = static_cast<T>(call.weight);
  const T divisor = gradient_divisor<T>(call.grad_scale.get(0, 1), call.maximize);
  // With a weight of 1 nothing of the average is left, be it infinite or NaN.
  const bool remembers = weight != 1;
  if (remembers) {
    load_momentum(momentum, call, m, box);
  }
  load(update, call.dtypes[kGradient], m.views[kGradient], box);
  // Each way has a loop of its own: of one loop with all of them GCC makes vectors for some ways alone.
  const auto update_by = [&](const auto& next) __attribute__((always_inline)) {
    for (int64_t i = 0; i < box.rows * box.cols; ++i) {
      update[i] = next(momentum[i], update[i] / divisor);
    }
  };
  if (!remembers) {
    update_by([](T& mean, T gradient) __attribute__((always_inline)) { return mean = gradient; });
  } else if (!call.nesterov) {
    update_by([&](T& mean, T gradient) __attribute__((always_inline)) { return mean = lerp(mean, gradient, weight); });
  } else {
    update_by([&](T& mean, T gradient) __attribute__((always_inline)) {
      mean = lerp(mean, gradient, weight);
      return lerp(mean, gradient, weight);
    });
  }
  store_momentum(momentum, call, m, box);
}

template <class T>
OPTIMIZER_INLINE void pack(const MomentumPack& call, UnitSums& sums, const Matrix<3>& m, const Box& box) {
  T update[kTileArea];
  if (call.gate.is_open(m.index)) {
    average(update, call, m, box);
  } else {
    std::fill_n(update, box.rows * box.cols, T(0));
  }
  store(update, call.dtypes[kPacked], m.views[kPacked], box);
  if (call.norms) {  // reads back what was packed, which the nearest cache still has
    sums.take_lines(m, call.dtypes[kPacked], m.views[kPacked], box);
  }
}

OPTIMIZER_CLONES void pack_in_float(const MomentumPack& call, UnitSums& sums, const Matrix<3>& m, const Box& box) {
  pack<float>(call, sums, m, box);
}

OPTIMIZER_CLONES void pack_in_double(const MomentumPack& call, UnitSums& sums, const Matrix<3>& m, const Box& box) {
  pack<double>(call, sums, m, box);
}

}  // namespace

void momentum_pack_cpu(const MomentumPack& call) {
  const auto pack = call.in_double() ? pack_in_double : pack_in_float;
  UnitSums sums = unit_sums(call.norms, call.matrices);
  std::vector<Matrix<3>> list = call.matrices;
  if (call.scales.empty()) {  // which have a place by row and column
    std::for_each(list.begin(), list.end(), collapse_whole_units<3>);
  }
  for_each_tile(std::move(list), [&](const auto& m, const Box& box) { pack(call, sums, m, box); });
  if (call.norms) {
    sums.write_norms(static_cast<double*>(call.norms->mutable_data_ptr()));
  }
}

}  // namespace optimizer
