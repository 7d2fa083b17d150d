// The checked arguments of newton_schulz_ and gram_newton_schulz_; their contracts are in
// torch-ext/optimizer/kernels/portable/newton_schulz.py.
#pragma once

#include "gemm.h"

#include <array>

namespace optimizer {

struct Step {
  float a, b, c;
};

// What both iterations have: X, which is overwritten, and the steps. Their squares, m x m, are of as many matrices as
// there are rooms.
template <class Element>
struct Iterated {
  int64_t count, m, n;
  Element* x = nullptr;
  int64_t x_batch_stride = 0, x_stride = 0;
  int64_t rooms = 0;
  std::vector<Step> steps = {};
  bool alone = false;
  std::string instructions = {};
};

template <class Element>
struct NewtonSchulz : Iterated<Element> {
  std::array<Element*, 2> squares = {};  // A, B
};

template <class Element>
struct GramNewtonSchulz : Iterated<Element> {
  std::array<float*, 4> squares = {};  // R, H, Q, T
  std::vector<int64_t> windows = {};
  std::string square_instructions = {};
};

using AnyNewtonSchulz = std::variant<NewtonSchulz<float>, NewtonSchulz<BFloat16>>;
using AnyGramNewtonSchulz = std::variant<GramNewtonSchulz<float>, GramNewtonSchulz<BFloat16>>;

inline std::vector<Step> check_steps(const std::vector<double>& coefficients) {
  STD_TORCH_CHECK(coefficients.size() % 3 == 0, "coefficients must be three for each step, got ", coefficients.size());
  std::vector<Step> steps;
  for (size_t i = 0; i < coefficients.size(); i += 3) {
    const auto at = [&](size_t k) { return static_cast<float>(coefficients[i + k]); };
    steps.push_back({at(0), at(1), at(2)});
  }
  return steps;
}

struct NamedSquare {
  const char* name;
  const Tensor& tensor;
};

// Checks X and its squares, which are of `dtype`, described as `like`, and fills in what both iterations have.
template <class Call, size_t kCount>
void check_iterated(Call& call, const Tensor& x, const std::array<NamedSquare, kCount>& squares, ScalarType dtype,
                    const char* like) {
  using Element = std::remove_pointer_t<decltype(call.x)>;
  const auto& [name, first] = squares[0];
  STD_TORCH_CHECK(x.dim() == 3 && first.dim() == 3, "X and ", name, " must be (batch, m, n) and (rooms, m, m), got ",
                  shape(x), " and ", shape(first));
  call.count = x.size(0);
  call.m = x.size(1);
  call.n = x.size(2);
  check_gemm_batch("X", x, x.scalar_type(), call.count, call.m, call.n);
  check_rows("X", x);
  call.rooms = first.size(0);
  STD_TORCH_CHECK(call.rooms > 0 || call.count == 0, name, " must have room for a matrix, got ", shape(first));
  Spans spans(kCount + 1);
  spans.write("X", x);
  for (size_t i = 0; i < kCount; ++i) {
    const auto& [name, square] = squares[i];
    check_gemm_batch(name, square, dtype, call.rooms, call.m, call.m, like);
    STD_TORCH_CHECK(square.is_contiguous(), name, " must be contiguous, got strides ", tuple(square.strides()));
    spans.write(name, square);
    call.squares[i] = static_cast<std::remove_reference_t<decltype(call.squares[i])>>(square.mutable_data_ptr());
  }
  spans.check();
  call.x = static_cast<Element*>(x.mutable_data_ptr());
  call.x_batch_stride = x.stride(0);
  call.x_stride = x.stride(1);
}

inline void check_dtype(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16,
                  "X must be float32 or bfloat16, got ", x.scalar_type());
}

// As many arguments as the op has.
inline AnyNewtonSchulz check_newton_schulz(const Tensor& x, const Tensor& a, const Tensor& b,
                                           std::vector<double> coefficients, bool alone, String instructions) {
  const std::string name = take(instructions);
  check_dtype(x);
  const auto complete = [&](auto call) -> AnyNewtonSchulz {
    check_iterated(call, x, std::array<NamedSquare, 2>{{{"A", a}, {"B", b}}}, x.scalar_type(), "as X is");
    call.alone = alone;
    call.steps = check_steps(coefficients);
    call.instructions = name;
    return call;
  };
  return x.scalar_type() == ScalarType::Float ? complete(NewtonSchulz<float>{}) : complete(NewtonSchulz<BFloat16>{});
}

inline void check_windows(const std::vector<int64_t>& windows, size_t steps) {
  int64_t left = steps;
  for (const int64_t window : windows) {
    STD_TORCH_CHECK(window > 0, "windows must have at least one step each, got ", tuple(windows));
    left -= std::min(window, left + 1);  // below zero if there are not so many, whatever the sum would be
  }
  STD_TORCH_CHECK(left == 0, "windows must have ", steps, " steps in all, got ", tuple(windows));
}

// As many arguments as the op has.
inline AnyGramNewtonSchulz check_gram_newton_schulz(const Tensor& x, const Tensor& r, const Tensor& h, const Tensor& q,
                                                    const Tensor& t, std::vector<double> coefficients,
                                                    std::vector<int64_t> windows, bool alone, String instructions,
                                                    String square_instructions) {
  const std::string name = take(instructions), name_of_squares = take(square_instructions);
  check_dtype(x);
  const auto complete = [&](auto call) -> AnyGramNewtonSchulz {
    const std::array<NamedSquare, 4> squares{{{"R", r}, {"H", h}, {"Q", q}, {"T", t}}};
    check_iterated(call, x, squares, ScalarType::Float, "whatever X is");
    call.alone = alone;
    call.steps = check_steps(coefficients);
    call.windows = windows;
    check_windows(windows, call.steps.size());
    call.instructions = name;
    call.square_instructions = name_of_squares;
    return call;
  };
  return x.scalar_type() == ScalarType::Float ? complete(GramNewtonSchulz<float>{})
                                              : complete(GramNewtonSchulz<BFloat16>{});
}

void newton_schulz_cpu(const AnyNewtonSchulz& call);
void gram_newton_schulz_cpu(const AnyGramNewtonSchulz& call);

}  // namespace optimizer
