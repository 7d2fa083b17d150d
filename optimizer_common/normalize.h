// The checked arguments of frobenius_norm_ and normalize_; their contract is in torch-ext/optimizer/kernels/native.py.
#pragma once

#include "arguments.h"

namespace optimizer {

enum NormalizeView { kNormalized, kGiven };

struct Normalize {
  ScalarType dtypes[2];  // that of `out` counts for normalize_ alone
  double* norms;         // one for each matrix
  int64_t count;
  double eps, scale;
  std::vector<Matrix<2>> matrices;
};

void frobenius_norm_cpu(const Normalize& call);
void normalize_cpu(const Normalize& call);

// What a matrix is multiplied with, in the precision that its elements have: finite, so that zeros stay zeros. No
// comparison is true of a NaN.
inline float multiplier_of(double norm, const Normalize& by) {
  // Smaller norms than the smallest normal number have no digits left to scale up.
  const double least = std::max<double>(by.eps, std::numeric_limits<float>::min());
  const double exact = by.scale / (norm < least ? least : norm), most = std::numeric_limits<float>::max();
  return static_cast<float>(exact > most ? most : exact);
}

inline void check_batch(const char* name, const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cpu(), name, " must be on the CPU, got ", place(t));
  STD_TORCH_CHECK(is_half(t.scalar_type()) || t.scalar_type() == ScalarType::Float, name,
                  " must be float32, float16 or bfloat16, got ", t.scalar_type());
  STD_TORCH_CHECK(t.dim() == 3, name, " must be (batch, rows, cols), got ", shape(t));
  for (int64_t d = 0; d < 3; ++d) {
    STD_TORCH_CHECK(t.size(d) == like.size(d), name, " must have the shape ", shape(like), " of X, got ", shape(t));
  }
}

inline void check_norms(const Tensor& norms, const Tensor& X) {
  STD_TORCH_CHECK(norms.is_cpu() && norms.scalar_type() == ScalarType::Double, "norms must be float64 on the CPU, got ",
                  norms.scalar_type(), " on ", place(norms));
  STD_TORCH_CHECK(norms.dim() == 1 && norms.size(0) == X.size(0) && norms.is_contiguous(), "norms must be (", X.size(0),
                  "), contiguous, got ", shape(norms));
}

// Tiles follow from the size of a matrix alone, not from where its elements are.
inline std::vector<Matrix<2>> tiled(const Tensor& out, const Tensor& X, bool written) {
  std::vector<Matrix<2>> matrices;
  int64_t tiles = 0;
  for (int64_t i = 0; i < X.size(0) && X.numel() > 0; ++i) {
    const auto view = [&](const Tensor& t, bool is_written) {
      char* const data = data_of(t, is_written) + i * t.stride(0) * element_size(t.scalar_type());
      return make_view(data, t.size(1), t.size(2), t.stride(1), t.stride(2));
    };
    Matrix<2> matrix{X.size(1), X.size(2), {view(out, written), view(X, false)}, i};
    cut(matrix, true);
    matrix.first_tile = tiles;
    tiles += tile_count(matrix);
    matrices.push_back(matrix);
  }
  return matrices;
}

inline Normalize check_frobenius_norm(const Tensor& norms, const Tensor& X) {
  check_batch("X", X, X);
  check_norms(norms, X);
  Spans spans(2);
  spans.write("norms", norms);
  spans.read("X", X);
  spans.check();
  return {{X.scalar_type(), X.scalar_type()}, static_cast<double*>(norms.mutable_data_ptr()), X.size(0), 0, 1,
          tiled(X, X, false)};
}

inline Normalize check_normalize(const Tensor& out, const Tensor& X, const Tensor& norms, double eps, double scale) {
  check_batch("X", X, X);
  check_batch("out", out, X);
  check_norms(norms, X);
  STD_TORCH_CHECK(eps >= 0, "eps must be at least 0, got ", eps);
  Spans spans(3);
  spans.write("out", out);
  spans.read("X", X);
  spans.read("norms", norms);
  spans.check();
  double* const given = const_cast<double*>(static_cast<const double*>(norms.const_data_ptr()));
  return {{out.scalar_type(), X.scalar_type()}, given, X.size(0), eps, scale, tiled(out, X, true)};
}

}  // namespace optimizer
