// The checked arguments of momentum_pack_; its contract is in torch-ext/optimizer/kernels/native.py.
#pragma once

#include "arguments.h"

namespace optimizer {

enum MomentumPackView { kMomentum, kGradient, kPacked };

struct MomentumPack {
  std::vector<Matrix<3>> matrices;
  ScalarType dtypes[3];
  bool in_double;
  double weight;  // of the gradient in the average
  bool nesterov, maximize;
  Numbers grad_scale;
  Gate gate;
};

// The divisor of the gradients.
template <class T>
OPTIMIZER_INLINE T gradient_divisor(double grad_scale, bool maximize) {
  return static_cast<T>(maximize ? -grad_scale : grad_scale);
}

// As many arguments as the op has.
inline MomentumPack check_momentum_pack(const Tensors& momentum, const Tensors& gradient, const Tensor& packed,
                                        double beta, bool nesterov, bool maximize, const MaybeInts& offsets,
                                        const MaybeTensor& active, const MaybeTensor& grad_scale,
                                        const MaybeTensor& found_inf) {
  const int64_t count = momentum.size();
  STD_TORCH_CHECK(gradient.size() == momentum.size(), "need as many gradients as momentum matrices, got ",
                  gradient.size(), " and ", momentum.size());
  STD_TORCH_CHECK(beta >= 0 && beta <= 1, "beta must be from 0 to 1, got ", beta);
  check_matrices("momentum", momentum, packed);
  check_matrices("gradient", gradient, packed);
  check_buffer("packed", packed, momentum, offsets);
  check_written("packed", packed);
  MomentumPack call{{},
                    {dtype_of(momentum), dtype_of(gradient), packed.scalar_type()},
                    false,
                    1 - beta,
                    nesterov,
                    maximize,
                    grad_scale ? numbers("grad_scale", *grad_scale, 1, packed) : Numbers{},
                    gate(active, found_inf, count, packed)};
  call.in_double = std::count(call.dtypes, call.dtypes + 3, ScalarType::Double) > 0;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor &m = momentum[i], &g = gradient[i];
    STD_TORCH_CHECK(g.size(0) == m.size(0) && g.size(1) == m.size(1), "gradient[", i, "] must have the shape ",
                    shape(m), " of its momentum, got ", shape(g));
    check_written("momentum", m);
    STD_TORCH_CHECK(m.numel() == 0 || m.const_data_ptr() != g.const_data_ptr(), "momentum[", i,
                    "] must not be its gradient: gradients are left untouched");
  }
  for (int64_t i = 0; i < count; ++i) {
    const View views[] = {view_of(momentum[i], true), view_of(gradient[i], false),
                          part_of(packed, true, offsets, momentum[i], i)};
    call.matrices.push_back({momentum[i].size(0), momentum[i].size(1), {views[0], views[1], views[2]}, i});
    if (is_one_run(call.matrices.back())) {
      collapse(call.matrices.back());
    }
  }
  return call;
}

}  // namespace optimizer
