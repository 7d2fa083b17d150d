// The parts of a product with AVX512_BF16. AMX uses the ones that move and round, too.
#pragma once

#if defined(__x86_64__)

#include "gemm_float32.h"

#include <immintrin.h>

#define OPTIMIZER_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define OPTIMIZER_AVX512_INLINE OPTIMIZER_AVX512 OPTIMIZER_INLINE

namespace optimizer::avx512 {

inline bool available() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// Transposes 16 x 16 words of 32 bits. Quarters of four rows are loaded into one register, so that only the words
// within a quarter are left to transpose.
OPTIMIZER_AVX512_INLINE void transpose_words(__m512i* to, const BFloat16* from, int64_t stride) {
  for (int quarter = 0; quarter < 4; ++quarter) {
    __m512i rows[4];
    for (int row = 0; row < 4; ++row) {
      const BFloat16* first = from + row * stride + quarter * 8;
      const auto load = [&](int lane) { return reinterpret_cast<const __m128i*>(first + lane * 4 * stride); };
      rows[row] = _mm512_castsi128_si512(_mm_loadu_si128(load(0)));
      rows[row] = _mm512_mask_broadcast_i32x4(rows[row], 0x00F0, _mm_loadu_si128(load(1)));
      rows[row] = _mm512_mask_broadcast_i32x4(rows[row], 0x0F00, _mm_loadu_si128(load(2)));
      rows[row] = _mm512_mask_broadcast_i32x4(rows[row], 0xF000, _mm_loadu_si128(load(3)));
    }
    const __m512i low01 = _mm512_unpacklo_epi32(rows[0], rows[1]), high01 = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(rows[2], rows[3]), high23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
    to[quarter * 4] = _mm512_unpacklo_epi64(low01, low23);
    to[quarter * 4 + 1] = _mm512_unpackhi_epi64(low01, low23);
    to[quarter * 4 + 2] = _mm512_unpacklo_epi64(high01, high23);
    to[quarter * 4 + 3] = _mm512_unpackhi_epi64(high01, high23);
  }
}

// Transposes 32 x 32 numbers: even and odd rows as pairs of numbers, which are then paired anew.
OPTIMIZER_AVX512 inline void transpose(BFloat16* to, const BFloat16* from, int64_t stride) {
  __m512i even[kTile], odd[kTile];
  transpose_words(even, from, 2 * stride);
  transpose_words(odd, from + stride, 2 * stride);
  constexpr __mmask32 kHigh = 0xAAAAAAAA;
  for (int pair = 0; pair < kTile; ++pair) {
    const __m512i first = _mm512_mask_blend_epi16(kHigh, even[pair], _mm512_slli_epi32(odd[pair], 16));
    const __m512i second = _mm512_mask_blend_epi16(kHigh, _mm512_srli_epi32(even[pair], 16), odd[pair]);
    _mm512_store_si512(to + 2 * pair * kBlockSide, first);
    _mm512_store_si512(to + (2 * pair + 1) * kBlockSide, second);
  }
}

OPTIMIZER_AVX512 inline void copy_rows(BFloat16* to, const BFloat16* from, int64_t stride) {
  for (int64_t row = 0; row < kBlockSide; ++row) {
    _mm512_store_si512(to + row * kBlockSide, _mm512_loadu_si512(from + row * stride));
  }
}

// B with rows as runs: each pair of rows interleaved.
OPTIMIZER_AVX512 inline void interleave(BFloat16* to, const BFloat16* from, int64_t stride) {
  alignas(64) uint16_t places[2][kBlockSide];
  for (int i = 0; i < kBlockSide; ++i) {
    places[0][i] = i / 2 + i % 2 * kBlockSide;
    places[1][i] = places[0][i] + kTile;
  }
  const __m512i left = _mm512_load_si512(places[0]), right = _mm512_load_si512(places[1]);
  for (int pair = 0; pair < kTile; ++pair, to += kBlockSide) {
    const __m512i first = _mm512_loadu_si512(from + 2 * pair * stride);
    const __m512i second = _mm512_loadu_si512(from + (2 * pair + 1) * stride);
    _mm512_store_si512(to, _mm512_permutex2var_epi16(first, left, second));
    _mm512_store_si512(to + kTile * kBlockSide, _mm512_permutex2var_epi16(first, right, second));
  }
}

// B with columns as runs.
OPTIMIZER_AVX512 inline void arrange_columns(BFloat16* to, const BFloat16* from, int64_t stride) {
  for (int tile = 0; tile < 2; ++tile, to += kTile * kBlockSide, from += kTile * stride) {
    __m512i pairs[kTile];
    transpose_words(pairs, from, stride);
    for (int pair = 0; pair < kTile; ++pair) {
      _mm512_store_si512(to + pair * kBlockSide, pairs[pair]);
    }
  }
}

// 8 rows of 32 columns in registers.
constexpr int kRows = 8;

OPTIMIZER_AVX512_INLINE void add_step(__m512 (&sums)[kRows][2], const BFloat16* a, const BFloat16* b) {
  for (int64_t pair = 0; pair < kTile; ++pair) {
    const __m512bh left = (__m512bh)_mm512_load_si512(b + pair * kBlockSide);
    const __m512bh right = (__m512bh)_mm512_load_si512(b + (kTile + pair) * kBlockSide);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      int32_t both;
      std::memcpy(&both, a + row * kBlockSide + 2 * pair, sizeof(both));
      const __m512bh factor = (__m512bh)_mm512_set1_epi32(both);
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], left, factor);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], right, factor);
    }
  }
}

OPTIMIZER_AVX512 inline void accumulate(float* sums, const BFloat16* a, const BFloat16* b, int64_t steps, bool first) {
  for (int64_t top = 0; top < kBlockSide; top += kRows) {
    float* left = sums + top / kTile * 2 * kTile * kTile + top % kTile * kTile;
    __m512 rows[kRows][2];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      rows[row][0] = first ? _mm512_setzero_ps() : _mm512_load_ps(left + row * kTile);
      rows[row][1] = first ? _mm512_setzero_ps() : _mm512_load_ps(left + (kTile + row) * kTile);
    }
    for (int64_t step = 0; step < steps; ++step) {
      add_step(rows, a + step * kBlockArea + top * kBlockSide, b + step * kBlockArea);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      _mm512_store_ps(left + row * kTile, rows[row][0]);
      _mm512_store_ps(left + (kTile + row) * kTile, rows[row][1]);
    }
  }
}

OPTIMIZER_AVX512 inline void round(BFloat16* to, const float* sums) {
  for (int64_t row = 0; row < kBlockSide; ++row, to += kBlockSide) {
    const __m512 left = _mm512_load_ps(sums + place_of_sum(row, 0));
    const __m512 right = _mm512_load_ps(sums + place_of_sum(row, kTile));
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(right, left));
  }
}

OPTIMIZER_AVX512 inline void finish(float* sums, const Epilogue<BFloat16>& epilogue, const Box& box) {
  finish_block(sums, epilogue, box, round, transpose);
}

constexpr Instructions<BFloat16> kInstructions{.name = "avx512_bf16",
                                              .sizes = {10, 8, 8, 192, 256},
                                              .available = available,
                                              .arrange_a = {transpose, copy_rows},
                                              .arrange_b = {interleave, arrange_columns},
                                              .accumulate = accumulate,
                                              .finish = finish,
                                              .finish_in_float32 = float32::finish};

}  // namespace optimizer::avx512

#endif
