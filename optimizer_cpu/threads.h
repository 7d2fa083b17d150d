// Work that threads take turns at: whoever is free takes what is next.
#pragma once

#include "../optimizer_common/element.h"

#include <algorithm>
#include <atomic>
#include <functional>

namespace optimizer {

struct Range {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
};

// As many threads as torch would use.
int64_t most_threads();

// Calls work(0) here, and work(i) with different 0 < i < threads on each other thread that is free before that returns.
void with_others(int64_t threads, const std::function<void(int64_t)>& work);

// Calls work(thread, next) on each of at most so many threads; next() returns some of the `count` tasks that nobody has
// taken yet, `grain` of them at most, and none when all are taken.
template <class Work>
void take_turns(int64_t count, int64_t grain, int64_t threads, const Work& work) {
  std::atomic<int64_t> taken{0};
  const auto next = [&] {
    const int64_t begin = std::min(count, taken.fetch_add(grain, std::memory_order_relaxed));
    return Range{begin, std::min(count, begin + grain)};
  };
  with_others(threads, [&](int64_t thread) { work(thread, next); });
}

}  // namespace optimizer
