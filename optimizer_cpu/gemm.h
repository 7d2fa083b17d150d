// The checked arguments of gemm_; its contract is in torch-ext/optimizer/kernels/native.py.
#pragma once

#include "../optimizer_common/arguments.h"

#include <torch/csrc/stable/c/shim.h>

namespace optimizer {

using BFloat16 = c10::BFloat16;

// A batch of matrices whose elements along one dimension are runs of memory; strides count elements.
struct Runs {
  const BFloat16* data = nullptr;
  int64_t batch_stride = 0, stride = 0;  // from matrix to matrix, from run to run
  bool along_k = false;                  // runs are along the dimension that is summed over
};

struct Gemm {
  int64_t count, m, n, k;
  Runs a = {}, b = {}, d = {};  // d without data where D is not given
  BFloat16* c = nullptr;
  int64_t c_batch_stride = 0, c_stride = 0;
  float alpha = 1, beta = 0;
  bool symmetric = false;
  bool in_place = false;  // C is B, and may be D
  std::string instructions;
};

void gemm_cpu(const Gemm& call);
std::string gemm_instructions();

// A string as the dispatcher hands it over, which the receiver has to delete: torch 2.13's own conversion to
// std::string leaks.
using String = StringHandle;

inline std::string take(String handle) {
  const char* data = nullptr;
  size_t length = 0;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  const std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

inline void check_gemm_batch(const char* name, const Tensor& t, int64_t count, int64_t rows, int64_t cols) {
  STD_TORCH_CHECK(t.is_cpu(), name, " must be on the CPU, got ", place(t));
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16, name, " must be bfloat16, got ", t.scalar_type());
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == count && t.size(1) == rows && t.size(2) == cols, name, " must be (",
                  count, ", ", rows, ", ", cols, "), got ", shape(t));
}

inline bool has_runs(const Tensor& t, int64_t dim) {
  return t.stride(dim) == 1 || t.size(dim) <= 1;
}

// An operand with rows or columns as runs of memory; `k` is the dimension that is summed over.
inline Runs check_operand(const char* name, const Tensor& t, int64_t k) {
  const bool by_rows = has_runs(t, 2);
  STD_TORCH_CHECK(by_rows || has_runs(t, 1), name, " must have a stride of 1 along rows or columns, got strides ",
                  tuple(t.strides()));
  const int64_t along = by_rows ? 2 : 1;
  return {static_cast<const BFloat16*>(t.const_data_ptr()), t.stride(0), t.stride(3 - along), along == k};
}

inline void check_rows(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(has_runs(t, 2), name, " must have a stride of 1 along rows, got strides ", tuple(t.strides()));
}

inline bool is_same(const Tensor& a, const Tensor& b) {
  const auto same = [](const auto& x, const auto& y) { return std::equal(x.begin(), x.end(), y.begin(), y.end()); };
  return a.const_data_ptr() == b.const_data_ptr() && same(a.sizes(), b.sizes()) && same(a.strides(), b.strides());
}

// As many arguments as the op has.
inline Gemm check_gemm(const Tensor& c, const Tensor& a, const Tensor& b, const MaybeTensor& d, double alpha,
                       double beta, bool symmetric, String instructions) {
  const std::string name = take(instructions);
  STD_TORCH_CHECK(a.dim() == 3 && b.dim() == 3, "A and B must be (batch, m, k) and (batch, k, n), got ", shape(a),
                  " and ", shape(b));
  Gemm call{a.size(0), a.size(1), b.size(2), a.size(2)};
  check_gemm_batch("A", a, call.count, call.m, call.k);
  check_gemm_batch("B", b, call.count, call.k, call.n);
  check_gemm_batch("C", c, call.count, call.m, call.n);
  check_rows("C", c);
  STD_TORCH_CHECK(!symmetric || call.m == call.n, "a symmetric result must be square, got ", shape(c));
  call.a = check_operand("A", a, 2);
  call.b = check_operand("B", b, 1);
  if (d) {
    check_gemm_batch("D", *d, call.count, call.m, call.n);
    check_rows("D", *d);
    call.d = {static_cast<const BFloat16*>(d->const_data_ptr()), d->stride(0), d->stride(1)};
  }
  Spans spans(4);
  spans.write("C", c);
  spans.read("A", a);
  call.in_place = !symmetric && is_same(c, b);
  if (!call.in_place) {
    spans.read("B", b);
  }
  if (d && !(call.in_place && is_same(c, *d))) {
    spans.read("D", d);
  }
  spans.check();
  call.c = static_cast<BFloat16*>(c.mutable_data_ptr());
  call.c_batch_stride = c.stride(0);
  call.c_stride = c.stride(1);
  call.alpha = static_cast<float>(alpha);
  call.beta = static_cast<float>(beta);
  call.symmetric = symmetric;
  call.instructions = name;
  return call;
}

}  // namespace optimizer
