// The parts of a product in plain C++, for every processor.
#pragma once

#include "gemm_float32.h"
#include "tiles.h"

namespace optimizer::portable {

inline bool available() {
  return true;
}

template <bool kAlongK>
OPTIMIZER_INLINE BFloat16 element(const BFloat16* from, int64_t stride, int64_t i, int64_t k) {
  return kAlongK ? from[i * stride + k] : from[k * stride + i];
}

template <bool kAlongK>
void arrange_a(BFloat16* to, const BFloat16* from, int64_t stride) {
  for (int64_t i = 0; i < kBlockSide; ++i) {
    for (int64_t k = 0; k < kBlockSide; ++k) {
      to[i * kBlockSide + k] = element<kAlongK>(from, stride, i, k);
    }
  }
}

// Each pair of numbers along k as 32 bits, its first number in the low half.
template <bool kAlongK>
void arrange_b(BFloat16* to, const BFloat16* from, int64_t stride) {
  for (int64_t i = 0; i < kBlockSide; ++i, to += kBlockSide) {
    const int64_t left = i / kTile * kTile, k = i % kTile * 2;
    uint32_t pairs[kTile];
    for (int64_t lane = 0; lane < kTile; ++lane) {
      const uint32_t first = element<kAlongK>(from, stride, left + lane, k).x;
      const uint32_t second = element<kAlongK>(from, stride, left + lane, k + 1).x;
      pairs[lane] = first | second << 16;
    }
    std::memcpy(static_cast<void*>(to), pairs, sizeof(pairs));
  }
}

typedef float Eight __attribute__((vector_size(32), may_alias));
// Pairs of numbers of eight columns.
typedef uint32_t Pairs __attribute__((vector_size(32), may_alias));

// The second number of a pair, as a float; the first one is shifted there.
constexpr uint32_t kSecond = 0xFFFF0000;

// As many rows as have their sums of 16 columns in registers.
constexpr int64_t kRowsAtOnce = 4;

// Adds the products of some rows of A with the columns of one tile of B. The products are exact, so that it does not
// matter whether a compiler contracts them.
OPTIMIZER_INLINE void add_rows(float* sums, const BFloat16* a, const BFloat16* b, int64_t steps) {
  Eight rows[kRowsAtOnce][2];
  std::memcpy(rows, sums, sizeof(rows));
  for (int64_t step = 0; step < steps; ++step, a += kBlockArea, b += kBlockArea) {
    for (int64_t k = 0; k < kBlockSide; k += 2) {
      const Pairs* const columns = reinterpret_cast<const Pairs*>(b + k * kTile);
#pragma GCC unroll 4
      for (int64_t row = 0; row < kRowsAtOnce; ++row) {
        uint32_t pair;
        std::memcpy(&pair, a + row * kBlockSide + k, sizeof(pair));
        const Pairs both = Pairs{} + pair;
        const Eight first = reinterpret_cast<Eight>(both << 16), second = reinterpret_cast<Eight>(both & kSecond);
#pragma GCC unroll 2
        for (int64_t side = 0; side < 2; ++side) {
          rows[row][side] += first * reinterpret_cast<Eight>(columns[side] << 16);
          rows[row][side] += second * reinterpret_cast<Eight>(columns[side] & kSecond);
        }
      }
    }
  }
  std::memcpy(sums, rows, sizeof(rows));
}

OPTIMIZER_CLONES void accumulate(float* sums, const BFloat16* a, const BFloat16* b, int64_t steps, bool first) {
  if (first) {
    std::fill_n(sums, kBlockArea, 0.0f);
  }
  for (int64_t left = 0; left < kBlockSide; left += kTile) {
    for (int64_t row = 0; row < kBlockSide; row += kRowsAtOnce) {
      add_rows(sums + place_of_sum(row, left), a + row * kBlockSide, b + left * kBlockSide, steps);
    }
  }
}

OPTIMIZER_INLINE void round(BFloat16* to, const float* sums) {
  for (int64_t i = 0; i < 2 * kBlockSide; ++i) {
    const int64_t row = i / 2, left = i % 2 * kTile;
    for (int64_t lane = 0; lane < kTile; ++lane) {
      to[row * kBlockSide + left + lane] = narrow<BFloat16>(sums[place_of_sum(row, left) + lane]);
    }
  }
}

OPTIMIZER_CLONES void finish(float* sums, const Epilogue<BFloat16>& epilogue, const Box& box) {
  finish_block(sums, epilogue, box, round, arrange_a<false>);
}

constexpr Instructions<BFloat16> kInstructions{.name = "portable",
                                              .sizes = {10, 8, 8, 192, 64},
                                              .available = available,
                                              .arrange_a = {arrange_a<false>, arrange_a<true>},
                                              .arrange_b = {arrange_b<false>, arrange_b<true>},
                                              .accumulate = accumulate,
                                              .finish = finish,
                                              .finish_in_float32 = float32::finish};

}  // namespace optimizer::portable
