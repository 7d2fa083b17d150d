// A batch of products, shared out among torch's threads. No sum depends on the shares.
#pragma once

#include "gemm_product.h"

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace optimizer {

// Costs are counted in multiplied blocks: what a block costs besides its steps, and packing a block of A.
constexpr int64_t kBlockCost = 3, kPackCost = 1;
// Cost under which waking another thread does not pay.
constexpr int64_t kGrain = 256;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

using Memory = std::unique_ptr<char, Free>;

// The results' row panels, in the order matrix, columns, row, in shares of about the same cost.
class Shares {
 public:
  Shares(const Product& product, int64_t matrices, int64_t most_threads) : product_(product), matrices_(matrices) {
    width_ = ceil_div(product.cols(), ceil_div(product.cols(), most_width(most_threads)));
    across_ = ceil_div(product.cols(), width_);
    costs_.push_back(0);
    for (int64_t i = 0; i < across_ * product.rows(); ++i) {
      const Part item = part(0, i);
      const int64_t blocks = product.reach(item.rows.begin, item.cols.end) - item.cols.begin;
      const int64_t cost = blocks * (product.steps() + kBlockCost) + product.steps() * kPackCost;
      costs_.push_back(costs_.back() + (blocks > 0 ? cost : 0));
    }
    threads_ = std::clamp<int64_t>(matrices * costs_.back() / kGrain, 1, most_threads);
  }

  int64_t threads() const { return threads_; }
  int64_t width() const { return width_; }

  // Calls work(part) for the parts of a thread's share.
  template <class Work>
  void for_each_part(int64_t thread, const Work& work) const {
    const int64_t per_matrix = costs_.size() - 1, end = start(thread + 1);
    for (int64_t i = start(thread); i < end;) {
      Part next = part(i / per_matrix, i % per_matrix);
      const int64_t rows = std::min(product_.rows() - next.rows.begin, end - i);
      next.rows.end = next.rows.begin + rows;
      i += rows;
      if (product_.reach(next.rows.end - 1, next.cols.end) > next.cols.begin) {
        work(next);
      }
    }
  }

 private:
  // Columns for which a thread packs B at once. Where threads share a matrix, their shares are about as high as wide,
  // which is when least is packed.
  int64_t most_width(int64_t threads) const {
    const int64_t bytes = product_.b_size(1) * sizeof(BFloat16), sharing = matrices_ < threads ? threads : 1;
    const double side = std::sqrt(static_cast<double>(product_.rows() * product_.cols()) / sharing);
    const int64_t fitting = bytes > 0 ? kMostBytes / bytes : kMostCols;
    return std::max<int64_t>(1, std::min({kMostCols, fitting, static_cast<int64_t>(std::ceil(side))}));
  }

  // Row panel i of a matrix.
  Part part(int64_t matrix, int64_t i) const {
    const int64_t row = i % product_.rows(), col = i / product_.rows() * width_;
    return {matrix, {row, row + 1}, {col, std::min(col + width_, product_.cols())}};
  }

  // The row panel at which the share of a thread starts.
  int64_t start(int64_t thread) const {
    const int64_t per_matrix = costs_.size() - 1, cost = costs_.back();
    const int64_t target = matrices_ * cost / threads_ * thread;
    if (thread == threads_) {
      return matrices_ * per_matrix;
    }
    const auto found = std::lower_bound(costs_.begin(), costs_.end(), target % cost);
    return target / cost * per_matrix + (found - costs_.begin());
  }

  const Product& product_;
  int64_t matrices_, threads_, width_, across_;
  std::vector<int64_t> costs_;  // of all row panels before each one of a matrix
};

inline void multiply(const Gemm& call, const Instructions& by) {
  const Product product(call, by);
  const Shares shares(product, call.count, torch::stable::get_num_threads());
  const int64_t a_size = product.a_size(), b_size = product.b_size(shares.width());
  const int64_t sums_size = product.sums_size(shares.width());
  const int64_t bytes = (a_size + b_size) * sizeof(BFloat16) + sums_size * sizeof(float);
  const Memory memory(static_cast<char*>(std::aligned_alloc(64, shares.threads() * bytes)));
  if (!memory) {
    throw std::bad_alloc();
  }
  torch::stable::parallel_for(0, shares.threads(), 1, [&](int64_t begin, int64_t end) {
    TileState before;
    by.enter(before);
    for (int64_t thread = begin; thread < end; ++thread) {
      float* const sums = reinterpret_cast<float*>(memory.get() + thread * bytes);
      BFloat16* const a = reinterpret_cast<BFloat16*>(sums + sums_size);
      shares.for_each_part(thread, [&](const Part& part) { product.compute(part, {a, a + a_size, sums}); });
    }
    by.leave(before);
  });
}

}  // namespace optimizer
