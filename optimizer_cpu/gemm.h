// The checked arguments of gemm_; its contract is in torch-ext/optimizer/kernels/portable/gemm.py.
#pragma once

#include "../optimizer_common/arguments.h"

#include <torch/csrc/stable/c/shim.h>

#include <variant>

namespace optimizer {

using BFloat16 = c10::BFloat16;

// A batch of matrices whose elements along one dimension are runs of memory; strides count elements.
template <class Element>
struct Runs {
  const Element* data = nullptr;
  int64_t batch_stride = 0, stride = 0;  // from matrix to matrix, from run to run
  bool along_k = false;                  // runs are along the dimension that is summed over
};

// The result may be float32 where the operands are not.
template <class Element, class Result = Element>
struct Gemm {
  int64_t count, m, n, k;
  Runs<Element> a = {}, b = {};
  Runs<Result> d = {};  // without data where D is not given
  Result* c = nullptr;
  int64_t c_batch_stride = 0, c_stride = 0;
  float alpha = 1, beta = 0;
  bool symmetric = false;
  bool in_place = false;  // C is B, and may be D
  std::string instructions;
};

using AnyGemm = std::variant<Gemm<float>, Gemm<BFloat16>, Gemm<BFloat16, float>>;

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

inline void check_gemm_batch(const char* name, const Tensor& t, ScalarType dtype, int64_t count, int64_t rows,
                             int64_t cols, const char* like = "as A is") {
  STD_TORCH_CHECK(t.is_cpu(), name, " must be on the CPU, got ", place(t));
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, " must be ", dtype, " ", like, ", got ", t.scalar_type());
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == count && t.size(1) == rows && t.size(2) == cols, name, " must be (",
                  count, ", ", rows, ", ", cols, "), got ", shape(t));
}

inline bool has_runs(const Tensor& t, int64_t dim) {
  return t.stride(dim) == 1 || t.size(dim) <= 1;
}

// An operand with rows or columns as runs of memory; `k` is the dimension that is summed over.
template <class Element>
Runs<Element> check_operand(const char* name, const Tensor& t, int64_t k) {
  const bool by_rows = has_runs(t, 2);
  STD_TORCH_CHECK(by_rows || has_runs(t, 1), name, " must have a stride of 1 along rows or columns, got strides ",
                  tuple(t.strides()));
  const int64_t along = by_rows ? 2 : 1;
  return {static_cast<const Element*>(t.const_data_ptr()), t.stride(0), t.stride(3 - along), along == k};
}

inline void check_rows(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(has_runs(t, 2), name, " must have a stride of 1 along rows, got strides ", tuple(t.strides()));
}

// As many arguments as the op has.
template <class Element, class Result = Element>
Gemm<Element, Result> check_gemm_of(const Tensor& c, const Tensor& a, const Tensor& b, const MaybeTensor& d,
                                    double alpha, double beta, bool symmetric, const std::string& instructions) {
  STD_TORCH_CHECK(a.dim() == 3 && b.dim() == 3, "A and B must be (batch, m, k) and (batch, k, n), got ", shape(a),
                  " and ", shape(b));
  Gemm<Element, Result> call{a.size(0), a.size(1), b.size(2), a.size(2)};
  const ScalarType dtype = a.scalar_type();
  check_gemm_batch("A", a, dtype, call.count, call.m, call.k);
  check_gemm_batch("B", b, dtype, call.count, call.k, call.n);
  const ScalarType of_result = std::is_same_v<Result, float> ? ScalarType::Float : dtype;
  const bool has_choice = dtype == ScalarType::BFloat16;
  check_gemm_batch("C", c, of_result, call.count, call.m, call.n, has_choice ? "as A is, or float32" : "as A is");
  check_rows("C", c);
  STD_TORCH_CHECK(!symmetric || call.m == call.n, "a symmetric result must be square, got ", shape(c));
  call.a = check_operand<Element>("A", a, 2);
  call.b = check_operand<Element>("B", b, 1);
  if (d) {
    check_gemm_batch("D", *d, of_result, call.count, call.m, call.n, "as C is");
    check_rows("D", *d);
    call.d = {static_cast<const Result*>(d->const_data_ptr()), d->stride(0), d->stride(1)};
  }
  Spans spans(4);
  spans.write("C", c);
  spans.read("A", a);
  call.in_place = std::is_same_v<Result, Element> && !symmetric && is_same(c, b);
  if (!call.in_place) {
    spans.read("B", b);
  }
  if (d && !(call.in_place && is_same(c, *d))) {
    spans.read("D", d);
  }
  spans.check();
  call.c = static_cast<Result*>(c.mutable_data_ptr());
  call.c_batch_stride = c.stride(0);
  call.c_stride = c.stride(1);
  call.alpha = static_cast<float>(alpha);
  call.beta = static_cast<float>(beta);
  call.symmetric = symmetric;
  call.instructions = instructions;
  return call;
}

inline AnyGemm check_gemm(const Tensor& c, const Tensor& a, const Tensor& b, const MaybeTensor& d, double alpha,
                          double beta, bool symmetric, String instructions) {
  const std::string name = take(instructions);
  if (a.scalar_type() == ScalarType::Float) {
    return check_gemm_of<float>(c, a, b, d, alpha, beta, symmetric, name);
  }
  STD_TORCH_CHECK(a.scalar_type() == ScalarType::BFloat16, "A must be float32 or bfloat16, got ", a.scalar_type());
  if (c.scalar_type() == ScalarType::Float) {
    return check_gemm_of<BFloat16, float>(c, a, b, d, alpha, beta, symmetric, name);
  }
  return check_gemm_of<BFloat16>(c, a, b, d, alpha, beta, symmetric, name);
}

void gemm_cpu(const AnyGemm& call);

// The best instructions here for matrices of a dtype, "float32" or "bfloat16".
std::string gemm_instructions(String dtype);

}  // namespace optimizer
