// Parts of the product of one pair of matrices, computed by one thread from operands that it packs for itself.
//
// Threads share nothing that they have packed: to read what another core has packed takes about as long as to pack it
// again.
#pragma once

#include "gemm_blocks.h"

#include <algorithm>

namespace optimizer {

// Steps of k in one go: that much of a panel of A, 20 KiB, stays in the first-level cache while panels of B pass by.
constexpr int64_t kMostSteps = 10;
// Rows and columns of blocks whose sums, at most 512 KiB, stay in the second-level cache from one go to the next. B is
// packed for no more columns, and no more bytes, at once.
constexpr int64_t kMostRows = 8, kMostCols = 16, kMostBytes = 8 << 20;

// Panels [begin, end) of an operand.
struct Range {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
};

// A rectangle of blocks of one result.
struct Part {
  int64_t matrix;
  Range rows, cols;
};

// What a thread works with.
struct Buffers {
  BFloat16 *a, *b;
  float* sums;
};

struct Operand {
  Runs runs;
  const Arrange* arrange;
  int64_t outer, k;  // sizes: of the dimension that is cut into panels, and of the one that is summed over

  // Panels one after another, each with these steps, in the order of memory; zeros where the operand ends.
  void pack(BFloat16* to, int64_t matrix, Range panels, Range steps) const {
    const BFloat16* from = runs.data + matrix * runs.batch_stride;
    const int64_t outer_stride = runs.along_k ? runs.stride : 1, k_stride = runs.along_k ? 1 : runs.stride;
    const int64_t slow_end = runs.along_k ? panels.size() : steps.size();
    const int64_t fast_end = runs.along_k ? steps.size() : panels.size();
    for (int64_t slow = 0; slow < slow_end; ++slow) {
      for (int64_t fast = 0; fast < fast_end; ++fast) {
        const int64_t panel = runs.along_k ? slow : fast, step = runs.along_k ? fast : slow;
        const int64_t first = (panels.begin + panel) * kBlock, k_first = (steps.begin + step) * kBlock;
        pack_block(to + (panel * steps.size() + step) * kBlockArea, from + first * outer_stride + k_first * k_stride,
                   std::min(kBlock, outer - first), std::min(kBlock, k - k_first));
      }
    }
  }

 private:
  void pack_block(BFloat16* to, const BFloat16* from, int64_t size, int64_t depth) const {
    if (size == kBlock && depth == kBlock) {
      return arrange[runs.along_k](to, from, runs.stride);
    }
    alignas(64) BFloat16 padded[kBlockArea];
    std::memset(static_cast<void*>(padded), 0, sizeof(padded));
    const int64_t lines = runs.along_k ? size : depth, length = runs.along_k ? depth : size;
    for (int64_t line = 0; line < lines; ++line) {
      std::memcpy(padded + line * kBlock, from + line * runs.stride, length * sizeof(BFloat16));
    }
    arrange[runs.along_k](to, padded, kBlock);
  }
};

class Product {
 public:
  Product(const Gemm& call, const Instructions& by)
      : call_(call), by_(by), a_{call.a, by.arrange_a, call.m, call.k}, b_{call.b, by.arrange_b, call.n, call.k} {
    steps_ = ceil_div(call.k, kBlock);
    run_ = ceil_div(steps_, std::max<int64_t>(1, ceil_div(steps_, kMostSteps)));
  }

  int64_t rows() const { return ceil_div(call_.m, kBlock); }
  int64_t cols() const { return ceil_div(call_.n, kBlock); }
  int64_t steps() const { return steps_; }

  // How many of the first `cols` blocks of a row are computed: of a symmetric result, those up to the diagonal.
  int64_t reach(int64_t row, int64_t cols) const { return call_.symmetric ? std::min(cols, row + 1) : cols; }

  int64_t a_size() const { return run_ * kBlockArea; }
  int64_t b_size(int64_t cols) const { return cols * steps_ * kBlockArea; }
  int64_t sums_size(int64_t cols) const {
    return (run_ < steps_ ? std::min(kMostRows, rows()) * cols : 2) * kBlockArea;
  }

  void compute(const Part& part, const Buffers& buffers) const {
    const Range cols{part.cols.begin, reach(part.rows.end - 1, part.cols.end)};
    b_.pack(buffers.b, part.matrix, cols, {0, steps_});
    const Epilogue epilogue = epilogue_of(part.matrix);
    for (int64_t row = part.rows.begin; row < part.rows.end; row += kMostRows) {
      const Range rows{row, std::min(row + kMostRows, part.rows.end)};
      Range steps{0, run_};
      do {
        add_steps({part.matrix, rows, cols}, buffers, steps, epilogue);
        steps = {steps.end, std::min(steps.end + run_, steps_)};
      } while (steps.begin < steps_);
    }
  }

 private:
  // Adds these steps to the sums; the last ones lead to results. A block is finished after the next one's products have
  // been started, as different parts of a core do the two.
  void add_steps(const Part& part, const Buffers& buffers, Range steps, const Epilogue& epilogue) const {
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
        const BFloat16* b = buffers.b + b_size(col - part.cols.begin) + steps.begin * kBlockArea;
        if (last) {
          prefetch(epilogue, box(row, col));
        }
        by_.accumulate(sums, buffers.a, b, steps.size(), steps.begin == 0);
        if (last && waiting) {
          by_.finish(waiting, epilogue, waiting_box);
        }
        waiting = sums;
        waiting_box = box(row, col);
        // Every block keeps its sums until the next go; where k fits into one, two buffers take turns.
        sums = run_ < steps_ || sums == buffers.sums ? sums + kBlockArea : buffers.sums;
      }
    }
    if (last && waiting) {
      by_.finish(waiting, epilogue, waiting_box);
    }
  }

  // Fetches the cache lines that `finish` will write, which it would otherwise wait for one after another.
  static void prefetch(const Epilogue& by, const Box& box) {
    for (int64_t row = 0; row < box.rows; ++row) {
      __builtin_prefetch(by.c + (box.row + row) * by.c_stride + box.col, 1);
    }
    for (int64_t row = 0; row < box.cols && by.symmetric && box.row != box.col; ++row) {
      __builtin_prefetch(by.c + (box.col + row) * by.c_stride + box.row, 1);
    }
  }

  Epilogue epilogue_of(int64_t matrix) const {
    const BFloat16* d = call_.d.data ? call_.d.data + matrix * call_.d.batch_stride : nullptr;
    BFloat16* c = call_.c + matrix * call_.c_batch_stride;
    return {call_.alpha, call_.beta, call_.symmetric, c, d, call_.c_stride, call_.d.stride};
  }

  Box box(int64_t row, int64_t col) const {
    const int64_t rows = std::min(kBlock, call_.m - row * kBlock), cols = std::min(kBlock, call_.n - col * kBlock);
    return {row * kBlock, col * kBlock, rows, cols};
  }

  const Gemm& call_;
  const Instructions& by_;
  Operand a_, b_;
  int64_t steps_, run_;  // along k: in all, and in one go
};

}  // namespace optimizer
