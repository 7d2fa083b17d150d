// Tiles transposed between arrays, on the CPU.
#pragma once

#include "../optimizer_common/element.h"

namespace optimizer {

// Squares of this side are transposed in registers, each of which holds a row.
constexpr int64_t kSquareSide = 8;

#if __has_builtin(__builtin_shufflevector)  // GCC has it since release 12
using SquareRow = float __attribute__((vector_size(kSquareSide * sizeof(float))));

// Rows next to each other exchange elements, then rows two apart, then rows four apart. The first two rounds stay
// within 16 bytes, as the fastest shuffles of x86-64 do.
OPTIMIZER_INLINE void transpose_square(float* to, int64_t to_stride, const float* from, int64_t from_stride) {
  SquareRow rows[kSquareSide], twos[kSquareSide], fours[kSquareSide];
  for (int64_t i = 0; i < kSquareSide; ++i) {
    std::memcpy(&rows[i], from + i * from_stride, sizeof(SquareRow));
  }
  for (int64_t i = 0; i < kSquareSide; i += 2) {
    twos[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    twos[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (const int64_t half : {0, 4}) {
    for (const int64_t i : {0, 1}) {
      const SquareRow &upper = twos[half + i], &lower = twos[half + i + 2];
      fours[half + 2 * i] = __builtin_shufflevector(upper, lower, 0, 1, 8, 9, 4, 5, 12, 13);
      fours[half + 2 * i + 1] = __builtin_shufflevector(upper, lower, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int64_t i = 0; i < 4; ++i) {
    const SquareRow first = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    const SquareRow second = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    std::memcpy(to + i * to_stride, &first, sizeof(SquareRow));
    std::memcpy(to + (i + 4) * to_stride, &second, sizeof(SquareRow));
  }
}
#else
OPTIMIZER_INLINE void transpose_square(float* to, int64_t to_stride, const float* from, int64_t from_stride) {
  for (int64_t r = 0; r < kSquareSide; ++r) {
    for (int64_t c = 0; c < kSquareSide; ++c) {
      to[c * to_stride + r] = from[r * from_stride + c];
    }
  }
}
#endif

// Writes `from` (rows, cols) to `to` (cols, rows); both are contiguous and share no memory.
template <class T>
OPTIMIZER_INLINE void transpose(T* __restrict to, const T* __restrict from, int64_t rows, int64_t cols) {
  int64_t whole_rows = 0, whole_cols = 0;  // in squares
  if constexpr (std::is_same_v<T, float>) {
    whole_rows = rows / kSquareSide * kSquareSide;
    whole_cols = cols / kSquareSide * kSquareSide;
    for (int64_t r = 0; r < whole_rows; r += kSquareSide) {
      for (int64_t c = 0; c < whole_cols; c += kSquareSide) {
        transpose_square(to + c * rows + r, rows, from + r * cols + c, cols);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < whole_rows ? whole_cols : 0; c < cols; ++c) {
      to[c * rows + r] = from[r * cols + c];
    }
  }
}

}  // namespace optimizer
