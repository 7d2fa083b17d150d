// Tiles transposed between arrays, on the CPU.
#pragma once

#include "../optimizer_common/element.h"

namespace optimizer {

// Squares of this side are transposed in registers. Each holds a row, of the 16 bytes that all processors have.
constexpr int64_t kSquareSide = 4;

#if __has_builtin(__builtin_shufflevector)  // GCC has it since release 12
using SquareRow = float __attribute__((vector_size(kSquareSide * sizeof(float))));

OPTIMIZER_INLINE void transpose_square(float* to, int64_t to_stride, const float* from, int64_t from_stride) {
  SquareRow rows[kSquareSide];
  for (int64_t i = 0; i < kSquareSide; ++i) {
    std::memcpy(&rows[i], from + i * from_stride, sizeof(SquareRow));
  }
  // Two columns of two rows each.
  const SquareRow left_of_upper = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
  const SquareRow right_of_upper = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
  const SquareRow left_of_lower = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const SquareRow right_of_lower = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  const SquareRow columns[kSquareSide] = {__builtin_shufflevector(left_of_upper, left_of_lower, 0, 1, 4, 5),
                                          __builtin_shufflevector(left_of_upper, left_of_lower, 2, 3, 6, 7),
                                          __builtin_shufflevector(right_of_upper, right_of_lower, 0, 1, 4, 5),
                                          __builtin_shufflevector(right_of_upper, right_of_lower, 2, 3, 6, 7)};
  for (int64_t i = 0; i < kSquareSide; ++i) {
    std::memcpy(to + i * to_stride, &columns[i], sizeof(SquareRow));
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
