// A batch of products, cut into tasks that threads take one after another. No sum depends on who takes which.
#pragma once

#include "call_memory.h"
#include "gemm_product.h"
#include "threads.h"

#include <vector>

namespace optimizer {

// Costs are counted in multiplied blocks: what a block costs besides its steps.
constexpr int64_t kBlockCost = 3;
// A thread that is held up delays the others by one task at most: so many of them for each thread.
constexpr int64_t kTasksPerThread = 6;

// The rectangles of blocks that results are cut into. Those of one matrix follow each other, the costly ones first.
template <class Element, class Result = Element>
class Tasks {
 public:
  Tasks(const Product<Element, Result>& product, int64_t matrices, int64_t grain, int64_t most_threads)
      : product_(product), matrices_(matrices), height_(product.height()), width_(product.width()) {
    cut();
    threads_ = std::clamp<int64_t>(cost_ / grain, 1, most_threads);
    const int64_t wanted = threads_ > 1 ? std::min(kTasksPerThread * threads_, cost_ / grain) : 1;
    while (size() < wanted && shrink()) {
      cut();
    }
  }

  int64_t threads() const { return threads_; }
  int64_t cost() const { return cost_; }
  int64_t width() const { return width_; }
  int64_t size() const { return matrices_ * parts_.size(); }

  Part operator[](int64_t i) const {
    Part part = parts_[i % parts_.size()];
    part.matrix = i / parts_.size();
    return part;
  }

 private:
  void cut() {
    parts_.clear();
    cost_ = 0;
    const int64_t down = ceil_div(product_.rows(), height_), across = ceil_div(product_.cols(), width_);
    for (int64_t i = 0; i < down * across; ++i) {
      const Part part{0, slice(product_.rows(), down, i / across), slice(product_.cols(), across, i % across)};
      if (product_.reach(part.rows.end - 1, part.cols.end) > part.cols.begin) {
        parts_.push_back(part);
        cost_ += matrices_ * cost_of(part);
      }
    }
    std::stable_sort(parts_.begin(), parts_.end(),
                     [&](const Part& a, const Part& b) { return cost_of(a) > cost_of(b); });
  }

  static Range slice(int64_t size, int64_t parts, int64_t i) { return {size * i / parts, size * (i + 1) / parts}; }

  int64_t cost_of(const Part& part) const {
    int64_t blocks = 0;
    for (int64_t row = part.rows.begin; row < part.rows.end; ++row) {
      blocks += std::max<int64_t>(0, product_.reach(row, part.cols.end) - part.cols.begin);
    }
    return blocks * (product_.steps() + kBlockCost);
  }

  // Halves the longer side: least is packed where parts are about as high as wide. False where neither can be.
  bool shrink() {
    int64_t& side = height_ > width_ && !product_.call().in_place ? height_ : width_;
    if (side == 1) {
      return false;
    }
    side = ceil_div(side, 2);
    return true;
  }

  const Product<Element, Result>& product_;
  int64_t matrices_, height_, width_, threads_ = 1, cost_ = 0;
  std::vector<Part> parts_;
};

template <class Element, class Result>
void multiply(const Gemm<Element, Result>& call, const Instructions<Element>& by) {
  const Product<Element, Result> product(call, by);
  const Tasks<Element, Result> tasks(product, call.count, by.sizes.grain, most_threads());
  const int64_t a_size = product.a_size(), b_size = product.b_size(tasks.width());
  const int64_t sums_size = product.sums_size(tasks.width());
  const int64_t bytes = (a_size + b_size) * sizeof(Element) + sums_size * sizeof(float);
  const CallMemory memory(tasks.threads() * bytes, tasks.threads());
  take_turns(tasks.size(), 1, tasks.threads(), [&](int64_t thread, const auto& next) {
    float* const sums = reinterpret_cast<float*>(memory.data() + thread * bytes);
    Element* const a = reinterpret_cast<Element*>(sums + sums_size);
    TileState before;
    by.enter(before);
    for (Range some = next(); some.size() > 0; some = next()) {
      product.compute(tasks[some.begin], {a, a + a_size, sums});
    }
    by.leave(before);
  });
}

}  // namespace optimizer
