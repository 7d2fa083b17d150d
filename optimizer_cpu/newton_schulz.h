// The checked arguments of newton_schulz_; its contract is in torch-ext/optimizer/kernels/native.py.
#pragma once

#include "gemm.h"

namespace optimizer {

// A = X Xᵀ, B = c A A + b A, X = B X + a X.
struct Step {
  float a, b, c;
};

template <class Element>
struct NewtonSchulz {
  int64_t count, m, n;
  Element* x = nullptr;
  int64_t x_batch_stride = 0, x_stride = 0;
  Element *a = nullptr, *b = nullptr;
  int64_t rooms = 0;  // so many matrices can have their A and B at a time
  bool alone = false;
  std::vector<Step> steps = {};
  std::string instructions = {};
};

using AnyNewtonSchulz = std::variant<NewtonSchulz<float>, NewtonSchulz<BFloat16>>;

inline std::vector<Step> check_steps(const std::vector<double>& coefficients) {
  STD_TORCH_CHECK(coefficients.size() % 3 == 0, "coefficients must be three for each step, got ", coefficients.size());
  std::vector<Step> steps;
  for (size_t i = 0; i < coefficients.size(); i += 3) {
    const auto at = [&](size_t k) { return static_cast<float>(coefficients[i + k]); };
    steps.push_back({at(0), at(1), at(2)});
  }
  return steps;
}

template <class Element>
NewtonSchulz<Element> check_newton_schulz_of(const Tensor& x, const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(x.dim() == 3 && a.dim() == 3, "X and A must be (batch, m, n) and (rooms, m, m), got ", shape(x),
                  " and ", shape(a));
  NewtonSchulz<Element> call{x.size(0), x.size(1), x.size(2)};
  const ScalarType dtype = x.scalar_type();
  check_gemm_batch("X", x, dtype, call.count, call.m, call.n, "X");
  check_rows("X", x);
  call.rooms = a.size(0);
  STD_TORCH_CHECK(call.rooms > 0 || call.count == 0, "A must have room for a matrix, got ", shape(a));
  check_gemm_batch("A", a, dtype, call.rooms, call.m, call.m, "X");
  check_gemm_batch("B", b, dtype, call.rooms, call.m, call.m, "X");
  STD_TORCH_CHECK(a.is_contiguous(), "A must be contiguous, got strides ", tuple(a.strides()));
  STD_TORCH_CHECK(b.is_contiguous(), "B must be contiguous, got strides ", tuple(b.strides()));
  Spans spans(3);
  spans.write("X", x);
  spans.write("A", a);
  spans.write("B", b);
  spans.check();
  call.x = static_cast<Element*>(x.mutable_data_ptr());
  call.x_batch_stride = x.stride(0);
  call.x_stride = x.stride(1);
  call.a = static_cast<Element*>(a.mutable_data_ptr());
  call.b = static_cast<Element*>(b.mutable_data_ptr());
  return call;
}

inline AnyNewtonSchulz check_newton_schulz(const Tensor& x, const Tensor& a, const Tensor& b,
                                           std::vector<double> coefficients, bool alone, String instructions) {
  const std::string name = take(instructions);
  const auto complete = [&](auto call) -> AnyNewtonSchulz {
    call.alone = alone;
    call.steps = check_steps(coefficients);
    call.instructions = name;
    return call;
  };
  if (x.scalar_type() == ScalarType::Float) {
    return complete(check_newton_schulz_of<float>(x, a, b));
  }
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "X must be float32 or bfloat16, got ", x.scalar_type());
  return complete(check_newton_schulz_of<BFloat16>(x, a, b));
}

void newton_schulz_cpu(const AnyNewtonSchulz& call);

}  // namespace optimizer
