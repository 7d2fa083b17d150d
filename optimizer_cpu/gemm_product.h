// Parts of the product of one pair of matrices, computed by one thread from operands that it packs for itself.
//
// Threads share nothing that they have packed: to read what another core has packed takes about as long as to pack it
// again.
#pragma once

#include "gemm_blocks.h"
#include "threads.h"

namespace optimizer {

// Fewer columns than this are packed too often: A for each of them, where B is packed for all of k.
constexpr int64_t kLeastWidth = 4;

// A rectangle of blocks of one result.
struct Part {
  int64_t matrix;
  Range rows, cols;
};

// What a thread works with.
template <class Element>
struct Buffers {
  Element *a, *b;
  float* sums;
};

template <class Element>
struct Operand {
  Runs<Element> runs;
  const Arrange<Element>* arrange;
  int64_t outer, k;  // sizes: of the dimension that is cut into panels, and of the one that is summed over

  // Panels one after another, each with these steps, in the order of memory; zeros where the operand ends.
  void pack(Element* to, int64_t matrix, Range panels, Range steps) const {
    const Element* from = runs.data + matrix * runs.batch_stride;
    const int64_t outer_stride = runs.along_k ? runs.stride : 1, k_stride = runs.along_k ? 1 : runs.stride;
    const int64_t slow_end = runs.along_k ? panels.size() : steps.size();
    const int64_t fast_end = runs.along_k ? steps.size() : panels.size();
    for (int64_t slow = 0; slow < slow_end; ++slow) {
      for (int64_t fast = 0; fast < fast_end; ++fast) {
        const int64_t panel = runs.along_k ? slow : fast, step = runs.along_k ? fast : slow;
        const int64_t first = (panels.begin + panel) * kBlockSide, k_first = (steps.begin + step) * kBlockSide;
        pack_block(to + (panel * steps.size() + step) * kBlockArea, from + first * outer_stride + k_first * k_stride,
                   std::min(kBlockSide, outer - first), std::min(kBlockSide, k - k_first));
      }
    }
  }

 private:
  void pack_block(Element* to, const Element* from, int64_t size, int64_t depth) const {
    if (size == kBlockSide && depth == kBlockSide) {
      return arrange[runs.along_k](to, from, runs.stride);
    }
    alignas(64) Element padded[kBlockArea];
    std::memset(static_cast<void*>(padded), 0, sizeof(padded));
    const int64_t lines = runs.along_k ? size : depth, length = runs.along_k ? depth : size;
    for (int64_t line = 0; line < lines; ++line) {
      std::memcpy(padded + line * kBlockSide, from + line * runs.stride, length * sizeof(Element));
    }
    arrange[runs.along_k](to, padded, kBlockSide);
  }
};

template <class Element, class Result = Element>
class Product {
 public:
  Product(const Gemm<Element, Result>& call, const Instructions<Element>& by)
      : call_(call), by_(by), a_{call.a, by.arrange_a, call.m, call.k}, b_{call.b, by.arrange_b, call.n, call.k} {
    steps_ = ceil_div(call.k, kBlockSide);
    run_ = ceil_div(steps_, std::max<int64_t>(1, ceil_div(steps_, by.sizes.steps)));
    width_ = std::min(by.sizes.cols, std::max(kLeastWidth, by.sizes.whole / std::max<int64_t>(1, steps_)));
    // Columns that are overwritten have to be packed before that.
    b_run_ = call.in_place || steps_ * width_ <= by.sizes.whole ? steps_ : run_;
    width_ = b_run_ == steps_ ? width_ : by.sizes.cols;
  }

  const Gemm<Element, Result>& call() const { return call_; }
  int64_t rows() const { return ceil_div(call_.m, kBlockSide); }
  int64_t cols() const { return ceil_div(call_.n, kBlockSide); }
  int64_t steps() const { return steps_; }

  // Columns and rows of blocks that a thread does well to work on at once; all rows where packed columns serve them all.
  int64_t width() const { return width_; }
  int64_t height() const { return b_run_ == steps_ ? rows() : by_.sizes.rows; }

  // How many of the first `cols` blocks of a row are computed: of a symmetric result, those up to the diagonal.
  int64_t reach(int64_t row, int64_t cols) const { return call_.symmetric ? std::min(cols, row + 1) : cols; }

  int64_t a_size() const { return run_ * kBlockArea; }
  int64_t b_size(int64_t cols) const { return cols * b_run_ * kBlockArea; }
  int64_t sums_size(int64_t cols) const {
    return (run_ < steps_ ? std::min(by_.sizes.rows, rows()) * cols : 2) * kBlockArea;
  }

  void compute(const Part& part, const Buffers<Element>& buffers) const {
    const Range cols{part.cols.begin, reach(part.rows.end - 1, part.cols.end)};
    if (b_run_ == steps_) {
      b_.pack(buffers.b, part.matrix, cols, {0, steps_});
    }
    const Epilogue<Result> epilogue = epilogue_of(part.matrix);
    for (int64_t row = part.rows.begin; row < part.rows.end; row += by_.sizes.rows) {
      const Range rows{row, std::min(row + by_.sizes.rows, part.rows.end)};
      Range steps{0, run_};
      do {
        if (b_run_ < steps_) {
          b_.pack(buffers.b, part.matrix, cols, steps);
        }
        add_steps({part.matrix, rows, cols}, buffers, steps, epilogue);
        steps = {steps.end, std::min(steps.end + run_, steps_)};
      } while (steps.begin < steps_);
    }
  }

 private:
  // Adds these steps to the sums; the last ones lead to results. A block is finished after the next one's products have
  // been started, as different parts of a core do the two.
  void add_steps(const Part& part, const Buffers<Element>& buffers, Range steps,
                 const Epilogue<Result>& epilogue) const {
    const bool last = steps.end == steps_;
    float* sums = buffers.sums;
    float* waiting = nullptr;
    Box waiting_box;
    for (int64_t row = part.rows.begin; row < part.rows.end; ++row) {
      const int64_t end = reach(row, part.cols.end);
      if (end <= part.cols.begin) {
        continue;
      }
      a_.pack(buffers.a, part.matrix, {row, row + 1}, steps);
      for (int64_t col = part.cols.begin; col < end; ++col) {
        const Element* b = buffers.b + packed_place(col - part.cols.begin, steps);
        if (last) {
          prefetch(epilogue, box(row, col));
        }
        by_.accumulate(sums, buffers.a, b, steps.size(), steps.begin == 0);
        if (last && waiting) {
          by_.template finish_as<Result>()(waiting, epilogue, waiting_box);
        }
        waiting = sums;
        waiting_box = box(row, col);
        // Every block keeps its sums until the next go; where k fits into one, two buffers take turns.
        sums = run_ < steps_ || sums == buffers.sums ? sums + kBlockArea : buffers.sums;
      }
    }
    if (last && waiting) {
      by_.template finish_as<Result>()(waiting, epilogue, waiting_box);
    }
  }

  // Where the blocks of these steps are in the packed panels of B.
  int64_t packed_place(int64_t panel, Range steps) const {
    return b_run_ == steps_ ? (panel * steps_ + steps.begin) * kBlockArea : panel * steps.size() * kBlockArea;
  }

  // Fetches the cache lines that `finish` will write, which it would otherwise wait for one after another.
  static void prefetch(const Epilogue<Result>& by, const Box& box) {
    for (int64_t row = 0; row < box.rows; ++row) {
      __builtin_prefetch(by.c + (box.row + row) * by.c_stride + box.col, 1);
    }
    for (int64_t row = 0; row < box.cols && by.symmetric && box.row != box.col; ++row) {
      __builtin_prefetch(by.c + (box.col + row) * by.c_stride + box.row, 1);
    }
  }

  Epilogue<Result> epilogue_of(int64_t matrix) const {
    const Result* d = call_.d.data ? call_.d.data + matrix * call_.d.batch_stride : nullptr;
    Result* c = call_.c + matrix * call_.c_batch_stride;
    return {call_.alpha, call_.beta, call_.symmetric, c, d, call_.c_stride, call_.d.stride};
  }

  Box box(int64_t row, int64_t col) const {
    const int64_t top = row * kBlockSide, left = col * kBlockSide;
    return {top, left, std::min(kBlockSide, call_.m - top), std::min(kBlockSide, call_.n - left)};
  }

  const Gemm<Element, Result>& call_;
  const Instructions<Element>& by_;
  Operand<Element> a_, b_;
  int64_t steps_, run_, b_run_;  // along k: in all, in one go, and for which B is packed at once
  int64_t width_;
};

}  // namespace optimizer
