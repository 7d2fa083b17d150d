// Memory for the length of a call, which a thread keeps for its next one.
//
// The C library may give freed memory back to the system. The next call then has to wait for new pages, which can take
// as long as a product.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

namespace optimizer {

// For each thread that works on the call. One that takes more has so much to do that waiting for pages hardly counts.
constexpr int64_t kMostKept = int64_t{4} << 20;
constexpr int64_t kCacheLine = 64;

class CallMemory {
 public:
  explicit CallMemory(int64_t bytes, int64_t threads = 1) : keeps_(bytes <= threads * kMostKept) {
    if (keeps_) {
      block_ = std::exchange(kept(), Block{});
    }
    if (block_.bytes < bytes) {
      const int64_t lines = (bytes + kCacheLine - 1) / kCacheLine;
      block_ = Block{};  // freed first, so that both are never held at once
      block_ = {Start(static_cast<char*>(std::aligned_alloc(kCacheLine, lines * kCacheLine))), bytes};
      if (!block_.start) {
        throw std::bad_alloc();
      }
    }
  }

  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  ~CallMemory() {
    if (keeps_) {
      kept() = std::move(block_);
    }
  }

  // At the beginning of a cache line.
  char* data() const { return block_.start.get(); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  using Start = std::unique_ptr<char, Free>;
  struct Block {
    Start start;
    int64_t bytes = 0;
  };

  static Block& kept() {
    thread_local Block block;
    return block;
  }

  const bool keeps_;
  Block block_;
};

}  // namespace optimizer
