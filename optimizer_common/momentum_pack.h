// The checked arguments of momentum_pack_; its contract is in torch-ext/optimizer/kernels/native.py.
#pragma once

#include "numbers.h"

namespace optimizer {

enum MomentumPackView { kMomentum, kGradient, kPacked };

struct MomentumPack {
  ScalarType dtypes[3];
  double weight;  // of the gradient in the average
  bool nesterov, maximize;
  Numbers grad_scale;
  Gate gate;
  int32_t device;  // of the matrices
  std::vector<Matrix<3>> matrices;

  bool in_double() const { return std::count(dtypes, dtypes + 3, ScalarType::Double) > 0; }
};

void momentum_pack_cpu(const MomentumPack& call);
void momentum_pack_cuda(const MomentumPack& call);

// The divisor of the gradients.
template <class T>
OPTIMIZER_INLINE T gradient_divisor(double grad_scale, bool maximize) {
  return static_cast<T>(maximize ? -grad_scale : grad_scale);
}

inline Spans pack_spans(const Tensors& momentum, const Tensors& gradient, const Tensor& packed) {
  Spans spans(2 * momentum.size() + 4);
  spans.write("packed", packed);
  for (size_t i = 0; i < momentum.size(); ++i) {
    const Tensor &m = momentum[i], &g = gradient[i];
    STD_TORCH_CHECK(g.size(0) == m.size(0) && g.size(1) == m.size(1), "gradient[", i, "] must have the shape ",
                    shape(m), " of its momentum, got ", shape(g));
    spans.write("momentum", m, i);
    spans.read("gradient", g, i);
  }
  return spans;
}

inline std::vector<Matrix<3>> pack_matrices(const Tensors& momentum, const Tensors& gradient, const Tensor& packed,
                                            const MaybeInts& offsets) {
  std::vector<Matrix<3>> matrices;
  for (int64_t i = 0; i < static_cast<int64_t>(momentum.size()); ++i) {
    const Tensor& m = momentum[i];
    const View views[] = {view_of(m, true), view_of(gradient[i], false), part_of(packed, true, offsets, m, i)};
    Matrix<3> matrix{m.size(0), m.size(1), {views[0], views[1], views[2]}, i};
    simplify(matrix);
    matrices.push_back(matrix);
  }
  return matrices;
}

// As many arguments as the op has.
inline MomentumPack check_momentum_pack(const Tensors& momentum, const Tensors& gradient, const Tensor& packed,
                                        double beta, bool nesterov, bool maximize, const MaybeInts& offsets,
                                        const MaybeTensor& active, const MaybeTensor& grad_scale,
                                        const MaybeTensor& found_inf) {
  STD_TORCH_CHECK(gradient.size() == momentum.size(), "need as many gradients as momentum matrices, got ",
                  gradient.size(), " and ", momentum.size());
  STD_TORCH_CHECK(beta >= 0 && beta <= 1, "beta must be from 0 to 1, got ", beta);
  check_matrices("momentum", momentum, packed);
  check_matrices("gradient", gradient, packed);
  check_buffer("packed", packed, momentum, offsets);
  Spans spans = pack_spans(momentum, gradient, packed);
  spans.read("active", active);
  spans.read("grad_scale", grad_scale);
  spans.read("found_inf", found_inf);
  spans.check();
  return {.dtypes = {dtype_of(momentum), dtype_of(gradient), packed.scalar_type()},
          .weight = 1 - beta,
          .nesterov = nesterov,
          .maximize = maximize,
          .grad_scale = grad_scale ? numbers("grad_scale", *grad_scale, 1, packed) : Numbers{},
          .gate = gate(active, found_inf, momentum.size(), packed),
          .device = packed.get_device_index(),
          .matrices = pack_matrices(momentum, gradient, packed, offsets)};
}

}  // namespace optimizer
