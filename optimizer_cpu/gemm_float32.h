// The parts of a product of float32 matrices, for vectors of three widths.
//
// Sums are chains in the order of k. Compilers contract `sum += a * b` where a processor has an instruction for it. So
// AVX2 and AVX-512 give the same bits, and "portable" gives others on x86-64, where it may not use them, than on ARM.
#pragma once

#include "gemm_blocks.h"
#include "tiles.h"
#include "transpose.h"

namespace optimizer::float32 {

// A packed block has 32 rows of A, or for each k the 32 columns of B.
inline void copy_rows(float* to, const float* from, int64_t stride) {
  for (int64_t row = 0; row < kBlockSide; ++row) {
    std::memcpy(to + row * kBlockSide, from + row * stride, kBlockSide * sizeof(float));
  }
}

typedef float Four __attribute__((vector_size(16), may_alias));

inline void transpose(float* to, const float* from, int64_t stride) {
  for (int64_t top = 0; top < kBlockSide; top += kSquareSide) {
    for (int64_t left = 0; left < kBlockSide; left += kSquareSide) {
      transpose_square(to + left * kBlockSide + top, kBlockSide, from + top * stride + left, stride);
    }
  }
}

// Adds the products of `kHeight` rows of A, from `top` on, with the columns of two vectors, from `left` on. These steps
// have sums of their own, which are added at the end: so roundings of one go do not grow with the sums of others.
template <class Vector, int kHeight>
OPTIMIZER_INLINE void add_rows(float* sums, const float* a, const float* b, int64_t steps, bool first, int64_t top,
                               int64_t left) {
  constexpr int64_t kPerVector = sizeof(Vector) / sizeof(float);
  Vector rows[kHeight][2] = {};
  for (int64_t step = 0; step < steps; ++step, a += kBlockArea, b += kBlockArea) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < kBlockSide; ++k) {
      const Vector* const columns = reinterpret_cast<const Vector*>(b + k * kBlockSide + left);
#pragma GCC unroll 8
      for (int row = 0; row < kHeight; ++row) {
        const float factor = a[(top + row) * kBlockSide + k];
        rows[row][0] += factor * columns[0];
        rows[row][1] += factor * columns[1];
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kHeight; ++row) {
    for (int side = 0; side < 2; ++side) {
      Vector& sum = *reinterpret_cast<Vector*>(sums + place_of_sum(top + row, left + side * kPerVector));
      sum = first ? rows[row][side] : sum + rows[row][side];
    }
  }
}

// A block's rows in groups of these heights: as many as have their sums in registers.
template <class Vector, int... kHeights>
OPTIMIZER_INLINE void add_block(float* sums, const float* a, const float* b, int64_t steps, bool first) {
  static_assert((kHeights + ...) == kBlockSide);
  constexpr int64_t kWidth = 2 * sizeof(Vector) / sizeof(float);
  for (int64_t left = 0; left < kBlockSide; left += kWidth) {
    int64_t top = 0;
    ((add_rows<Vector, kHeights>(sums, a, b, steps, first, top, left), top += kHeights), ...);
  }
}

OPTIMIZER_INLINE void round(float* to, const float* sums) {
  for (int64_t row = 0; row < kBlockSide; ++row) {
    std::memcpy(to + row * kBlockSide, sums + place_of_sum(row, 0), kTile * sizeof(float));
    std::memcpy(to + row * kBlockSide + kTile, sums + place_of_sum(row, kTile), kTile * sizeof(float));
  }
}

OPTIMIZER_CLONES void finish(float* sums, const Epilogue<float>& epilogue, const Box& box) {
  finish_block(sums, epilogue, box, round, transpose);
}

inline void accumulate(float* sums, const float* a, const float* b, int64_t steps, bool first) {
  add_block<Four, 4, 4, 4, 4, 4, 4, 4, 4>(sums, a, b, steps, first);
}

inline bool has_portable() {
  return true;
}

constexpr Instructions<float> with(const char* name, bool (*available)(), decltype(&accumulate) accumulate) {
  return {.name = name,
          .sizes = {8, 8, 8, 512, 64},
          .available = available,
          .arrange_a = {transpose, copy_rows},
          .arrange_b = {copy_rows, transpose},
          .accumulate = accumulate,
          .finish = finish};
}

constexpr Instructions<float> kPortable = with("portable", has_portable, accumulate);

#if defined(__x86_64__)

#define OPTIMIZER_AVX2 __attribute__((target("avx2,fma")))
// A test compiles this code for AVX2: vectors of 16 become two of 8, and so it runs where there is no AVX-512.
#ifndef OPTIMIZER_AVX512F
#define OPTIMIZER_AVX512F __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,fma")))
#endif

typedef float Eight __attribute__((vector_size(32), may_alias));
typedef float Sixteen __attribute__((vector_size(64), may_alias));

inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

OPTIMIZER_AVX2 inline void accumulate_avx2(float* sums, const float* a, const float* b, int64_t steps, bool first) {
  add_block<Eight, 6, 6, 6, 6, 4, 4>(sums, a, b, steps, first);
}

inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

OPTIMIZER_AVX512F inline void accumulate_avx512(float* sums, const float* a, const float* b, int64_t steps, bool first) {
  add_block<Sixteen, 8, 8, 8, 8>(sums, a, b, steps, first);
}

constexpr Instructions<float> kAvx2 = with("avx2", has_avx2, accumulate_avx2);
constexpr Instructions<float> kAvx512 = with("avx512", has_avx512, accumulate_avx512);

#endif

}  // namespace optimizer::float32
