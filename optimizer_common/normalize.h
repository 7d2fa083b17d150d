// The checked arguments of frobenius_norm_ and normalize_; their contract is in
// torch-ext/optimizer/kernels/portable/norms.py.
#pragma once

#include "arguments.h"

#include <limits>

namespace optimizer {

enum NormalizeView { kNormalized, kGiven };

// A batch, whose matrices all lie as the first one does.
struct Batch {
  ScalarType dtypes[2];
  Matrix<2> first;
  int64_t steps[2];  // bytes from a matrix to the next one
  int64_t count;

  OPTIMIZER_INLINE int64_t tiles() const { return count * first.tiles; }

  // The matrix that holds a tile.
  OPTIMIZER_INLINE Matrix<2> matrix_of_tile(int64_t tile) const {
    Matrix<2> m = first;
    m.index = quotient_of_tiles(tile, first.tiles);
    m.first_tile = m.index * first.tiles;
    for (int k = 0; k < 2; ++k) {
      m.views[k].data += m.index * steps[k];
    }
    return m;
  }
};

// A norm stands for a matrix, or for one of its rows.
struct FrobeniusNorm {
  Batch batch;  // both views are of X
  Tensor norms;
  bool of_rows;
  int32_t device;
};

struct Normalize {
  Batch batch;
  const double* norms;
  bool of_rows;
  double eps, scale;
  int32_t device;
};

void frobenius_norm_cpu(const FrobeniusNorm& call);
void frobenius_norm_cuda(const FrobeniusNorm& call);
void normalize_cpu(const Normalize& call);
void normalize_cuda(const Normalize& call);

// What a matrix is multiplied with, in the precision that its elements have: finite, so that zeros stay zeros. No
// comparison is true of a NaN.
OPTIMIZER_INLINE float multiplier_of(double norm, double eps, double scale) {
  // Smaller norms than the smallest normal number have no digits left to scale up.
  constexpr double kLeastNormal = std::numeric_limits<float>::min(), kLargest = std::numeric_limits<float>::max();
  const double least = eps > kLeastNormal ? eps : kLeastNormal;
  const double exact = scale / (norm < least ? least : norm);
  return static_cast<float>(exact > kLargest ? kLargest : exact);
}

inline void check_batch(const char* name, const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(t.device() == like.device(), name, " must be on ", place(like), " like X, got ", place(t));
  STD_TORCH_CHECK(is_half(t.scalar_type()) || t.scalar_type() == ScalarType::Float, name,
                  " must be float32, float16 or bfloat16, got ", t.scalar_type());
  STD_TORCH_CHECK(t.dim() == 3, name, " must be (batch, rows, cols), got ", shape(t));
  for (int64_t d = 0; d < 3; ++d) {
    STD_TORCH_CHECK(t.size(d) == like.size(d), name, " must have the shape ", shape(like), " of X, got ", shape(t));
  }
}

inline void check_place_of_norms(const Tensor& norms, const Tensor& X) {
  STD_TORCH_CHECK(norms.device() == X.device() && norms.scalar_type() == ScalarType::Double,
                  "norms must be float64 on ", place(X), ", got ", norms.scalar_type(), " on ", place(norms));
}

inline void check_norms(const Tensor& norms, const Tensor& X) {
  check_place_of_norms(norms, X);
  STD_TORCH_CHECK(norms.dim() == 1 && norms.size(0) == X.size(0) && norms.is_contiguous(), "norms must be (", X.size(0),
                  "), contiguous, got ", shape(norms));
}

// The norms that a pass over a list of matrices brings along are those of its batch, whose matrices count as wide ones:
// where they are tall, as their transposes.
inline void check_norms_of(const char* name, const Tensor& batch, const MaybeInts& offsets, const MaybeTensor& norms) {
  if (norms) {
    STD_TORCH_CHECK(!offsets, "norms need a batch, so offsets must not be given");
    STD_TORCH_CHECK(batch.scalar_type() != ScalarType::Double, "norms are those of float32, float16 or bfloat16, but ",
                    name, " is ", batch.scalar_type());
    check_norms(*norms, batch);
  }
}

// Norms of rows are (B, m).
inline bool are_of_rows(const Tensor& norms, const Tensor& X) {
  if (norms.dim() != 2) {
    check_norms(norms, X);
    return false;
  }
  check_place_of_norms(norms, X);
  STD_TORCH_CHECK(norms.size(0) == X.size(0) && norms.size(1) == X.size(1) && norms.is_contiguous(),
                  "norms of rows must be (", X.size(0), ", ", X.size(1), "), contiguous, got ", shape(norms));
  return true;
}

inline Squares squares_for(const MaybeTensor& norms, const Tensor& matrix) {
  return !norms ? Squares::kUnused : matrix.size(0) > matrix.size(1) ? Squares::kByColumns : Squares::kByRows;
}

inline Batch batch_of(const Tensor& out, const Tensor& X, bool written) {
  const auto view = [](const Tensor& t, bool is_written) {
    return make_view(data_of(t, is_written), t.size(1), t.size(2), t.stride(1), t.stride(2));
  };
  const auto step = [](const Tensor& t) { return t.stride(0) * element_size(t.scalar_type()); };
  return {{out.scalar_type(), X.scalar_type()},
          {X.size(1), X.size(2), {view(out, written), view(X, false)}},
          {step(out), step(X)},
          X.size(0)};
}

inline FrobeniusNorm check_frobenius_norm(const Tensor& norms, const Tensor& X) {
  check_batch("X", X, X);
  const bool of_rows = are_of_rows(norms, X);
  Spans spans(2);
  spans.write("norms", norms);
  spans.read("X", X);
  spans.check();
  FrobeniusNorm call{batch_of(X, X, false), norms, of_rows, X.get_device_index()};
  call.batch.first.squares = Squares::kByRows;
  return call;
}

inline Normalize check_normalize(const Tensor& out, const Tensor& X, const Tensor& norms, double eps, double scale) {
  check_batch("X", X, X);
  check_batch("out", out, X);
  const bool of_rows = are_of_rows(norms, X);
  STD_TORCH_CHECK(eps >= 0, "eps must be at least 0, got ", eps);
  Spans spans(3);
  spans.write("out", out);
  if (!is_same(out, X)) {  // each element is read before it is written
    spans.read("X", X);
  }
  spans.read("norms", norms);
  spans.check();
  const auto* const divisors = static_cast<const double*>(norms.const_data_ptr());
  return {batch_of(out, X, true), divisors, of_rows, eps, scale, X.get_device_index()};
}

}  // namespace optimizer
