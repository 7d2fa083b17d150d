// Which square of which symmetric result a cluster computes: index math, for host and device.
//
// A result (m, m) is cut into squares of kSquare, a cluster's work. Those on and below the diagonal are walked in groups
// of kGroup rows, each column by column up to the corner at the diagonal, so that clusters at work at one time share
// panels of the operands. One matrix follows another. Which squares there are, and in which order, depends on m alone.
#pragma once

#include "element.h"

#include <cmath>
#include <cstdint>

namespace optimizer::hopper {

constexpr int kSquare = 256;
// 16 panels of 256 rows, those of a group and of as many columns, take 16 MiB of the cache at k = 2048.
constexpr int kGroup = 8;
// Beyond this the squares of one matrix are no longer counted in 31 bits.
constexpr int kMostSide = 46340;

// Row and column in squares, row >= col.
struct Square {
  int matrix, row, col;
};

OPTIMIZER_INLINE constexpr int triangle(int side) {
  return static_cast<int>(static_cast<int64_t>(side) * (side + 1) / 2);
}

// The row of `index` in a walk through a lower triangle row by row. The root is off by less than one row.
OPTIMIZER_INLINE int triangle_row(int index) {
  int row = static_cast<int>((sqrtf(8.0f * static_cast<float>(index) + 1.0f) - 1.0f) * 0.5f);
  row += triangle(row + 1) <= index;
  row -= triangle(row) > index;
  return row;
}

// All squares of a call.
struct Squares {
  int side = 0;   // squares along a matrix
  int count = 0;  // of all matrices

  OPTIMIZER_INLINE Square at(int index) const {
    const int in_matrix = index % triangle(side);
    const int first = triangle_row(in_matrix) / kGroup * kGroup;  // a group begins where the walk by rows begins a row
    const int rows = side - first < kGroup ? side - first : kGroup;
    const int in_group = in_matrix - triangle(first);
    const int in_corner = in_group - first * rows;  // negative left of the group's own triangle
    if (in_corner < 0) {
      return {index / triangle(side), first + in_group % rows, in_group / rows};
    }
    const int row = triangle_row(in_corner);
    return {index / triangle(side), first + row, first + in_corner - triangle(row)};
  }
};

OPTIMIZER_INLINE Squares squares_of(int64_t matrices, int64_t m) {
  const int side = static_cast<int>((m + kSquare - 1) / kSquare);
  return {side, static_cast<int>(matrices * triangle(side))};
}

}  // namespace optimizer::hopper
