// The links of newton_schulz_ and gram_newton_schulz_: an iteration is a list of them, and each does one thing to every
// matrix.
#pragma once

#include "gemm_tasks.h"
#include "newton_schulz.h"
#include "tiles.h"

#include <memory>

namespace optimizer {

class Link {
 public:
  virtual ~Link() = default;

  // What it costs for one matrix, as a part of what it takes to wake another thread; and the memory that it works in.
  virtual double grains() const { return 0; }
  virtual int64_t bytes() const { return 0; }

  virtual void finish(int64_t matrix, char* memory) const = 0;  // of one matrix, by this thread
  virtual void finish_all() const = 0;                          // of all matrices, by all threads
};

using Links = std::vector<std::unique_ptr<const Link>>;

template <class Element, class Result>
class ProductLink final : public Link {
 public:
  ProductLink(const Gemm<Element, Result>& call, const Instructions<Element>& by)
      : call_(call), by_(by), product_(call_, by), tasks_(product_, 1, by.sizes.grain, 1) {}

  double grains() const override { return double(tasks_.cost()) / by_.sizes.grain; }
  int64_t bytes() const override { return (a_size() + b_size()) * sizeof(Element) + sums_size() * sizeof(float); }

  void finish(int64_t matrix, char* memory) const override {
    float* const sums = reinterpret_cast<float*>(memory);
    Element* const a = reinterpret_cast<Element*>(sums + sums_size());
    for (int64_t i = 0; i < tasks_.size(); ++i) {
      Part part = tasks_[i];
      part.matrix = matrix;
      product_.compute(part, {a, a + a_size(), sums});
    }
  }

  void finish_all() const override { multiply(call_, by_); }

 private:
  int64_t a_size() const { return product_.a_size(); }
  int64_t b_size() const { return product_.b_size(tasks_.width()); }
  int64_t sums_size() const { return product_.sums_size(tasks_.width()); }

  const Gemm<Element, Result> call_;
  const Instructions<Element>& by_;
  const Product<Element, Result> product_;
  const Tasks<Element, Result> tasks_;
};

// What is done to `length` elements of the squares of each matrix, work(matrix, range), between products.
template <class Work>
class SquareLink final : public Link {
 public:
  SquareLink(int64_t count, int64_t length, Work work) : count_(count), length_(length), work_(work) {}

  void finish(int64_t matrix, char*) const override { work_(matrix, Range{0, length_}); }

  void finish_all() const override {
    const int64_t parts = ceil_div(length_, kGrain);
    share(count_ * parts, 1, count_ * length_, [&](const Range& one) {
      const int64_t begin = one.begin % parts * kGrain;
      work_(one.begin / parts, Range{begin, std::min(length_, begin + kGrain)});
    });
  }

 private:
  const int64_t count_, length_;
  const Work work_;
};

// Some matrices of a call and their rooms: `room` and the following ones, or `room` for all of them.
struct MatrixSlice {
  int64_t begin, count, room;
  bool one_room;
};

// Makes the links of an iteration whose squares have elements of type Number.
template <class Element, class Number>
class Chain {
 public:
  Chain(const Iterated<Element>& call, const MatrixSlice& slice, const Instructions<Element>& by,
        const Instructions<Number>& by_squares)
      : call_(call), slice_(slice), by_(by), by_squares_(by_squares), area_(call.m * call.m) {}

  // Where a square of the slice's first matrix is.
  Number* of_slice(Number* square) const { return square + slice_.room * area_; }

  // C = X Xᵀ
  void add_gram(Number* c) {
    Gemm<Element, Number> gemm{slice_.count, call_.m, call_.m, call_.n};
    gemm.a = gemm.b = runs_of_x(true);
    write(gemm, c);
    add(gemm, by_);
  }

  // C = A B
  void add_product(Number* c, const Number* a, const Number* b) {
    Gemm<Number> gemm = square_product(a, b);
    write(gemm, c);
    add(gemm, by_squares_);
  }

  // C = c A A + b A
  void add_polynomial(Number* c, const Number* a, const Step& step) {
    Gemm<Number> gemm = square_product(a, a);
    gemm.d = gemm.b;
    gemm.alpha = step.c;
    gemm.beta = step.b;
    write(gemm, c);
    add(gemm, by_squares_);
  }

  // X = B X + factor X, with squares B that are so many elements apart.
  void add_affine(const Element* b, int64_t stride, float factor) {
    Gemm<Element> gemm{slice_.count, call_.m, call_.n, call_.m};
    gemm.a = {b, slice_.one_room ? 0 : stride, call_.m, true};
    gemm.b = runs_of_x(false);
    if (factor != 0) {
      gemm.d = gemm.b;
    }
    gemm.c = x();
    gemm.c_batch_stride = call_.x_batch_stride;
    gemm.c_stride = call_.x_stride;
    gemm.beta = factor;
    gemm.in_place = true;
    add(gemm, by_);
  }

  void add_to_diagonal(Number* square, float number) {
    if (number != 0) {
      add_work(call_.m, [=, m = call_.m, stride = square_stride()](int64_t matrix, const Range& rows) {
        for (int64_t i = rows.begin; i < rows.end; ++i) {
          square[matrix * stride + i * (m + 1)] += number;
        }
      });
    }
  }

  void add_rounding(BFloat16* to, const float* from) {
    add_work(area_, [=, stride = square_stride()](int64_t matrix, const Range& some) {
      // A rounded square begins where the numbers of its room do.
      BFloat16* const rounded = to + matrix * stride * int64_t(sizeof(float) / sizeof(BFloat16)) + some.begin;
      const View run{reinterpret_cast<char*>(rounded), some.size(), 1};
      store(from + matrix * stride + some.begin, ScalarType::BFloat16, run, {0, 0, 1, some.size()});
    });
  }

  Links take() { return std::move(links_); }

 private:
  int64_t square_stride() const { return slice_.one_room ? 0 : area_; }
  Element* x() const { return call_.x + slice_.begin * call_.x_batch_stride; }
  Runs<Element> runs_of_x(bool along_k) const { return {x(), call_.x_batch_stride, call_.x_stride, along_k}; }

  Gemm<Number> square_product(const Number* a, const Number* b) const {
    Gemm<Number> gemm{slice_.count, call_.m, call_.m, call_.m};
    gemm.a = {a, square_stride(), call_.m, true};
    gemm.b = {b, square_stride(), call_.m, false};
    return gemm;
  }

  template <class Operand>
  void write(Gemm<Operand, Number>& gemm, Number* c) const {
    gemm.c = c;
    gemm.c_batch_stride = square_stride();
    gemm.c_stride = call_.m;
    gemm.symmetric = true;
  }

  template <class Operand, class Result>
  void add(const Gemm<Operand, Result>& gemm, const Instructions<Operand>& by) {
    links_.push_back(std::make_unique<ProductLink<Operand, Result>>(gemm, by));
  }

  template <class Work>
  void add_work(int64_t length, Work work) {
    links_.push_back(std::make_unique<SquareLink<Work>>(slice_.count, length, work));
  }

  const Iterated<Element>& call_;
  const MatrixSlice slice_;
  const Instructions<Element>& by_;
  const Instructions<Number>& by_squares_;
  const int64_t area_;
  Links links_;
};

template <class Element>
Links links_of(const NewtonSchulz<Element>& call, const MatrixSlice& slice, const Instructions<Element>& by) {
  Chain<Element, Element> chain(call, slice, by, by);
  Element *const a = chain.of_slice(call.squares[0]), *const b = chain.of_slice(call.squares[1]);
  for (const Step& step : call.steps) {
    chain.add_gram(a);
    chain.add_polynomial(b, a, step);
    chain.add_affine(b, call.m * call.m, step.a);
  }
  return chain.take();
}

// In each window R = X Xᵀ. A step turns R into h(R) R h(R), where h(R) = c R R + b R + a I; the product Q of all h is
// applied to X at the end. A single step adds a X instead: then a is not rounded to X's type with the rest.
template <class Element>
Links links_of(const GramNewtonSchulz<Element>& call, const MatrixSlice& slice, const Instructions<Element>& by,
               const Instructions<float>& by_squares) {
  Chain<Element, float> chain(call, slice, by, by_squares);
  const auto& [first, second, third, fourth] = call.squares;
  float *const r = chain.of_slice(first), *const h = chain.of_slice(second);
  float *q = chain.of_slice(third), *t = chain.of_slice(fourth);
  auto step = call.steps.begin();
  for (const int64_t window : call.windows) {
    chain.add_gram(r);
    for (int64_t left = window; left > 0; --left, ++step) {
      float* const polynomial = left == window ? q : h;
      chain.add_polynomial(polynomial, r, *step);
      chain.add_to_diagonal(polynomial, window == 1 ? 0 : step->a);
      if (left < window) {
        chain.add_product(t, q, polynomial);
        std::swap(q, t);
      }
      if (left > 1) {
        chain.add_product(t, r, polynomial);
        chain.add_product(r, polynomial, t);
      }
    }
    const float addend = window == 1 ? step[-1].a : 0;
    if constexpr (std::is_same_v<Element, float>) {
      chain.add_affine(q, call.m * call.m, addend);
    } else {
      Element* const rounded = reinterpret_cast<Element*>(t);
      chain.add_rounding(rounded, q);
      chain.add_affine(rounded, call.m * call.m * int64_t(sizeof(float) / sizeof(Element)), addend);
    }
  }
  return chain.take();
}

}  // namespace optimizer
