// The checked arguments of momentum_pack_; its contract is in torch-ext/optimizer/kernels/portable/momentum_pack.py.
#pragma once

#include "normalize.h"
#include "numbers.h"
#include "quantize.h"

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
  std::vector<View> scales;  // of each matrix, whose blocks lie along its rows; empty for floating-point momentum
  MaybeTensor norms;         // of each packed matrix, if they are wanted

  bool in_double() const { return std::count(dtypes, dtypes + 3, ScalarType::Double) > 0; }
};

void momentum_pack_cpu(const MomentumPack& call);
void momentum_pack_cuda(const MomentumPack& call);

// The divisor of the gradients.
template <class T>
OPTIMIZER_INLINE T gradient_divisor(double grad_scale, bool maximize) {
  return static_cast<T>(maximize ? -grad_scale : grad_scale);
}

inline bool has_blocks_along_rows(const Tensor& momentum, const Tensor& scale) {
  return scale.size(0) == momentum.size(0) && scale.size(1) == ceil_div(momentum.size(1), kMomentumBlock);
}

inline bool has_blocks_along_columns(const Tensor& momentum, const Tensor& scale) {
  return scale.size(0) == ceil_div(momentum.size(0), kMomentumBlock) && scale.size(1) == momentum.size(1);
}

// Momentum in 8 bits, with a matrix of scales for each of codes.
inline void check_codes(const Tensors& momentum, const Tensors& scale, const Tensor& packed) {
  STD_TORCH_CHECK(scale.size() == momentum.size(), "momentum_scale must be one per matrix, ", momentum.size(), ", got ",
                  scale.size());
  for (size_t i = 0; i < scale.size(); ++i) {
    const Tensor &m = momentum[i], &s = scale[i];
    check_matrix("momentum", m, i);
    check_matrix("momentum_scale", s, i);
    check_device("momentum", m, packed);
    check_device("momentum_scale", s, packed);
    STD_TORCH_CHECK(m.scalar_type() == ScalarType::Char && s.scalar_type() == ScalarType::Float, "momentum[", i,
                    "] must be Char and momentum_scale[", i, "] Float, got ", m.scalar_type(), " and ",
                    s.scalar_type());
    STD_TORCH_CHECK(has_blocks_along_rows(m, s) || has_blocks_along_columns(m, s), "momentum_scale[", i,
                    "] must have an element for each ", kMomentumBlock, " of a row or of a column of ", shape(m),
                    ", got ", shape(s));
  }
}

inline void check_momentum(const Tensors& momentum, const MaybeTensors& scale, const Tensor& packed) {
  return scale ? check_codes(momentum, *scale, packed) : check_matrices("momentum", momentum, packed);
}

inline Spans pack_spans(const Tensors& momentum, const MaybeTensors& scale, const Tensors& gradient,
                        const Tensor& packed) {
  Spans spans(3 * momentum.size() + 5);
  spans.write("packed", packed);
  for (size_t i = 0; i < momentum.size(); ++i) {
    const Tensor &m = momentum[i], &g = gradient[i];
    STD_TORCH_CHECK(g.size(0) == m.size(0) && g.size(1) == m.size(1), "gradient[", i, "] must have the shape ",
                    shape(m), " of its momentum, got ", shape(g));
    spans.write("momentum", m, i);
    spans.read("gradient", g, i);
    if (scale) {
      spans.write("momentum_scale", (*scale)[i], i);
    }
  }
  return spans;
}

// The scales of a matrix, which is transposed where its blocks lie along its columns.
inline View transpose_to_blocks(Matrix<3>& matrix, const Tensor& momentum, const Tensor& scale) {
  View scales = view_of(scale, true);
  if (!has_blocks_along_rows(momentum, scale)) {
    transpose(matrix);
    scales = transposed(scales);
  }
  return scales;
}

inline void add_matrices(MomentumPack& call, const Tensors& momentum, const MaybeTensors& scale,
                         const Tensors& gradient, const Tensor& packed, const MaybeInts& offsets) {
  for (int64_t i = 0; i < static_cast<int64_t>(momentum.size()); ++i) {
    const Tensor& m = momentum[i];
    const View views[] = {view_of(m, true), view_of(gradient[i], false), part_of(packed, true, offsets, m, i)};
    Matrix<3> matrix{m.size(0), m.size(1), {views[0], views[1], views[2]}, i};
    matrix.squares = squares_for(call.norms, m);
    if (scale) {
      call.scales.push_back(transpose_to_blocks(matrix, m, (*scale)[i]));
    } else {
      simplify(matrix);
    }
    call.matrices.push_back(matrix);
  }
}

// As many arguments as the op has.
inline MomentumPack check_momentum_pack(const Tensors& momentum, const Tensors& gradient, const Tensor& packed,
                                        double beta, bool nesterov, bool maximize, const MaybeInts& offsets,
                                        const MaybeTensor& active, const MaybeTensor& grad_scale,
                                        const MaybeTensor& found_inf, const MaybeTensors& momentum_scale,
                                        const MaybeTensor& norms) {
  STD_TORCH_CHECK(gradient.size() == momentum.size(), "need as many gradients as momentum matrices, got ",
                  gradient.size(), " and ", momentum.size());
  STD_TORCH_CHECK(beta >= 0 && beta <= 1, "beta must be from 0 to 1, got ", beta);
  check_momentum(momentum, momentum_scale, packed);
  check_matrices("gradient", gradient, packed);
  check_buffer("packed", packed, momentum, offsets);
  check_norms_of("packed", packed, offsets, norms);
  Spans spans = pack_spans(momentum, momentum_scale, gradient, packed);
  spans.read("active", active);
  spans.read("grad_scale", grad_scale);
  spans.read("found_inf", found_inf);
  if (norms) {
    spans.write("norms", *norms);
  }
  spans.check();
  MomentumPack call{.dtypes = {dtype_of(momentum), dtype_of(gradient), packed.scalar_type()},
                    .weight = 1 - beta,
                    .nesterov = nesterov,
                    .maximize = maximize,
                    .grad_scale = grad_scale ? numbers("grad_scale", *grad_scale, 1, packed) : Numbers{},
                    .gate = gate(active, found_inf, momentum.size(), packed),
                    .device = packed.get_device_index(),
                    .norms = norms};
  add_matrices(call, momentum, momentum_scale, gradient, packed, offsets);
  return call;
}

}  // namespace optimizer
