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
  for (int64_t i = 0; i < kBlock; ++i) {
    for (int64_t k = 0; k < kBlock; ++k) {
      to[i * kBlock + k] = element<kAlongK>(from, stride, i, k);
    }
  }
}

template <bool kAlongK>
void arrange_b(BFloat16* to, const BFloat16* from, int64_t stride) {
  for (int64_t j = 0; j < kBlock; ++j) {
    for (int64_t k = 0; k < kBlock; ++k) {
      to[j / kTile * kTile * kBlock + k / 2 * kBlock + j % kTile * 2 + k % 2] = element<kAlongK>(from, stride, j, k);
    }
  }
}

// Adds a pair of products to each of 16 sums. A pair of numbers is read as 32 bits, the first one in the low half.
OPTIMIZER_INLINE void add_pair(float* sums, const BFloat16* a, const BFloat16* b) {
  const float even = a[0], odd = a[1];
  uint32_t pairs[kTile];
  std::memcpy(pairs, b, sizeof(pairs));
  for (int64_t col = 0; col < kTile; ++col) {
    // The products are exact, so that it does not matter whether a compiler contracts them.
    sums[col] += even * bits_as<float>(pairs[col] << 16);
    sums[col] += odd * bits_as<float>(pairs[col] & 0xFFFF0000u);
  }
}

OPTIMIZER_CLONES void accumulate(float* sums, const BFloat16* a, const BFloat16* b, int64_t steps, bool first) {
  if (first) {
    std::fill_n(sums, kBlockArea, 0.0f);
  }
  for (int64_t step = 0; step < steps; ++step, a += kBlockArea, b += kBlockArea) {
    for (int64_t i = 0; i < 2 * kBlock; ++i) {
      const int64_t row = i / 2, col = i % 2 * kTile;
      float row_sums[kTile];
      std::copy_n(sums + place_of_sum(row, col), kTile, row_sums);
      for (int64_t k = 0; k < kBlock; k += 2) {
        add_pair(row_sums, a + row * kBlock + k, b + col * kBlock + k * kTile);
      }
      std::copy_n(row_sums, kTile, sums + place_of_sum(row, col));
    }
  }
}

OPTIMIZER_INLINE void round(BFloat16* to, const float* sums) {
  for (int64_t row = 0; row < kBlock; ++row) {
    for (int64_t col = 0; col < kBlock; ++col) {
      to[row * kBlock + col] = narrow<BFloat16>(sums[place_of_sum(row, col)]);
    }
  }
}

OPTIMIZER_CLONES void finish(float* sums, const Epilogue<BFloat16>& epilogue, const Box& box) {
  finish_block(sums, epilogue, box, round, arrange_a<false>);
}

constexpr Instructions<BFloat16> kInstructions{.name = "portable",
                                              .sizes = {10, 8, 8, 192, 256},
                                              .available = available,
                                              .arrange_a = {arrange_a<false>, arrange_a<true>},
                                              .arrange_b = {arrange_b<false>, arrange_b<true>},
                                              .accumulate = accumulate,
                                              .finish = finish,
                                              .finish_in_float32 = float32::finish};

}  // namespace optimizer::portable
