// Who does what in newton_schulz_. A thread takes a matrix through all of its steps: its core's cache keeps the matrix,
// and no thread waits for another between two products. Matrices that are left over are shared, product by product.
#pragma once

#include "gemm_tasks.h"
#include "newton_schulz.h"

namespace optimizer {

// The three products of a step for `count` matrices from `begin` on. Their A and B are those of `room` and, if
// `square_stride` is not 0, of the following ones.
template <class Element>
struct StepProducts {
  Gemm<Element> gram, square, affine;

  StepProducts(const NewtonSchulz<Element>& call, int64_t begin, int64_t count, int64_t room, int64_t square_stride) {
    const int64_t m = call.m, n = call.n;
    Element* const x = call.x + begin * call.x_batch_stride;
    Element* const a = call.a + room * m * m;
    Element* const b = call.b + room * m * m;
    const auto runs = [](const Element* data, int64_t batch_stride, int64_t stride, bool along_k) {
      return Runs<Element>{data, batch_stride, stride, along_k};
    };
    gram = product(call, count, m, n);
    gram.a = gram.b = runs(x, call.x_batch_stride, call.x_stride, true);
    gram.c = a;
    gram.c_batch_stride = square_stride;
    gram.c_stride = m;
    gram.symmetric = true;
    square = product(call, count, m, m);
    square.a = runs(a, square_stride, m, true);
    square.b = square.d = runs(a, square_stride, m, false);
    square.c = b;
    square.c_batch_stride = square_stride;
    square.c_stride = m;
    square.symmetric = true;
    affine = product(call, count, n, m);
    affine.a = runs(b, square_stride, m, true);
    affine.b = affine.d = runs(x, call.x_batch_stride, call.x_stride, false);
    affine.c = x;
    affine.c_batch_stride = call.x_batch_stride;
    affine.c_stride = call.x_stride;
    affine.in_place = true;
  }

  void take(const Step& step) {
    square.alpha = step.c;
    square.beta = step.b;
    affine.beta = step.a;
    affine.d.data = step.a == 0 ? nullptr : affine.b.data;
  }

 private:
  static Gemm<Element> product(const NewtonSchulz<Element>& call, int64_t count, int64_t n, int64_t k) {
    Gemm<Element> gemm{count, call.m, n, k};
    gemm.instructions = call.instructions;
    return gemm;
  }
};

// One product by one thread.
template <class Element>
class Alone {
 public:
  Alone(const Gemm<Element>& call, const Instructions<Element>& by)
      : product_(call, by), tasks_(product_, 1, by.sizes.grain, 1) {}

  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

  int64_t cost() const { return tasks_.cost(); }
  int64_t a_size() const { return product_.a_size(); }
  int64_t b_size() const { return product_.b_size(tasks_.width()); }
  int64_t sums_size() const { return product_.sums_size(tasks_.width()); }

  void compute(int64_t matrix, const Buffers<Element>& buffers) const {
    for (int64_t i = 0; i < tasks_.size(); ++i) {
      Part part = tasks_[i];
      part.matrix = matrix;
      product_.compute(part, buffers);
    }
  }

 private:
  const Product<Element> product_;
  const Tasks<Element> tasks_;
};

// What one thread does: all steps of one matrix after another, with one room for their A and B.
template <class Element>
class Lane {
 public:
  Lane(const NewtonSchulz<Element>& call, const Instructions<Element>& by, int64_t room)
      : steps_(call.steps),
        products_(call, 0, call.count, room, 0),
        gram_(products_.gram, by),
        square_(products_.square, by),
        affine_(products_.affine, by) {}

  int64_t cost() const { return (gram_.cost() + square_.cost() + affine_.cost()) * int64_t(steps_.size()); }
  int64_t bytes() const { return (a_size() + b_size()) * sizeof(Element) + sums_size() * sizeof(float); }

  void finish(int64_t matrix, char* memory) {
    float* const sums = reinterpret_cast<float*>(memory);
    Element* const a = reinterpret_cast<Element*>(sums + sums_size());
    const Buffers<Element> buffers{a, a + a_size(), sums};
    for (const Step& step : steps_) {
      products_.take(step);
      gram_.compute(matrix, buffers);
      square_.compute(matrix, buffers);
      affine_.compute(matrix, buffers);
    }
  }

 private:
  int64_t a_size() const { return std::max({gram_.a_size(), square_.a_size(), affine_.a_size()}); }
  int64_t b_size() const { return std::max({gram_.b_size(), square_.b_size(), affine_.b_size()}); }
  int64_t sums_size() const { return std::max({gram_.sums_size(), square_.sums_size(), affine_.sums_size()}); }

  const std::vector<Step>& steps_;
  StepProducts<Element> products_;  // to which the following three refer
  const Alone<Element> gram_, square_, affine_;
};

// The first matrices, the same number for each thread. Returns how many: none if there are fewer than threads, or
// fewer rooms.
template <class Element>
int64_t iterate_alone(const NewtonSchulz<Element>& call, const Instructions<Element>& by) {
  const Lane<Element> lane(call, by, 0);
  const int64_t threads = std::clamp<int64_t>(call.count * lane.cost() / by.sizes.grain, 1, most_threads());
  const int64_t matrices = call.count / threads * threads;
  if (matrices == 0 || call.rooms < threads) {
    return 0;
  }
  const int64_t bytes = lane.bytes();
  const CallMemory memory(threads * bytes, threads);
  take_turns(matrices, 1, threads, [&](int64_t thread, const auto& next) {
    Lane<Element> mine(call, by, thread);
    TileState before;
    by.enter(before);
    for (Range some = next(); some.size() > 0; some = next()) {
      mine.finish(some.begin, memory.data() + thread * bytes);
    }
    by.leave(before);
  });
  return matrices;
}

// The matrices from `begin` on, as many together as there are rooms.
template <class Element>
void iterate_together(const NewtonSchulz<Element>& call, const Instructions<Element>& by, int64_t begin) {
  for (; begin < call.count; begin += call.rooms) {
    StepProducts<Element> products(call, begin, std::min(call.rooms, call.count - begin), 0, call.m * call.m);
    for (const Step& step : call.steps) {
      products.take(step);
      multiply(products.gram, by);
      multiply(products.square, by);
      multiply(products.affine, by);
    }
  }
}

template <class Element>
void iterate(const NewtonSchulz<Element>& call, const Instructions<Element>& by) {
  iterate_together(call, by, call.alone ? iterate_alone(call, by) : 0);
}

}  // namespace optimizer
