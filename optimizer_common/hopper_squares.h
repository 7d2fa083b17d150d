// Which section of which square of which symmetric result a cluster computes: index math, for host and device.
//
// A result (m, m) is cut into squares of kSquare. Those on and below the diagonal are walked in groups of kGroup rows,
// each column by column up to the corner at the diagonal, so that clusters at work at one time share panels of the
// operands. One matrix follows another. A cluster sums a square from beginning to end. But the last squares of each
// matrix, too few to occupy all clusters, may be cut along k into sections, which several clusters sum. Which squares
// there are, and in which order, depends on m alone. Into how many sections they are cut, the caller says.
#pragma once

#include "element.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace optimizer::hopper {

constexpr int kSquare = 256;
constexpr int kTileDepth = 64;  // of k, multiplied in a step
// 16 panels of 256 rows, those of a group and of as many columns, take 16 MiB of the cache at k = 2048.
constexpr int kGroup = 8;
// More than memory holds. Up to this the squares of one matrix are counted in 31 bits.
constexpr int kMostSide = 46340;

// Clusters at work at one time on 132 multiprocessors. A smaller GPU cuts the same squares, for the same bits.
constexpr int kAtOnce = 66;
constexpr int kMostSections = 8;

// Row and column in squares, row >= col.
struct Square {
  int matrix, row, col;
};

// One of `sections` sections along k of a square; `number` is the square's among those that have several.
struct Section {
  Square square;
  int section, sections, number;
};

// The tiles along k that a section sums.
struct Tiles {
  int first, count;
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

OPTIMIZER_INLINE int tiles_along(int64_t k) { return static_cast<int>((k + kTileDepth - 1) / kTileDepth); }

// Of `tiles` in all, at most 2^25.
OPTIMIZER_INLINE Tiles tiles_of(const Section& at, int tiles) {
  const int first = tiles * at.section / at.sections, end = tiles * (at.section + 1) / at.sections;
  return {first, end - first};
}

// All sections of a call.
struct Sections {
  int side = 0;      // squares along a matrix
  int last = 0;      // squares of a matrix, at its end, that are cut
  int sections = 1;  // of each of them
  int count = 0;     // of all matrices

  OPTIMIZER_INLINE int whole() const { return triangle(side) - last; }
  OPTIMIZER_INLINE int of_matrix() const { return whole() + last * sections; }

  OPTIMIZER_INLINE Section at(int index) const {
    const int matrix = index / of_matrix(), in_matrix = index % of_matrix(), beyond = in_matrix - whole();
    if (beyond < 0) {
      return {square(matrix, in_matrix), 0, 1, 0};
    }
    const int cut = beyond / sections;
    return {square(matrix, whole() + cut), beyond % sections, sections, matrix * last + cut};
  }

  OPTIMIZER_INLINE Square square(int matrix, int index) const {
    const int first = triangle_row(index) / kGroup * kGroup;  // a group begins where the walk by rows begins a row
    const int rows = side - first < kGroup ? side - first : kGroup;
    const int in_group = index - triangle(first);
    const int in_corner = in_group - first * rows;  // negative left of the group's own triangle
    if (in_corner < 0) {
      return {matrix, first + in_group % rows, in_group / rows};
    }
    const int row = triangle_row(in_corner);
    return {matrix, first + row, first + in_corner - triangle(row)};
  }
};

// The last squares are cut into `sections` sections, or one for each tile if these are fewer.
inline Sections sections_of_call(int64_t matrices, int64_t m, int64_t k, int64_t sections) {
  Sections all;
  all.side = static_cast<int>((m + kSquare - 1) / kSquare);
  all.sections = static_cast<int>(std::min<int64_t>(sections, tiles_along(k)));
  all.last = all.sections > 1 ? triangle(all.side) % kAtOnce : 0;
  all.count = static_cast<int>(matrices * all.of_matrix());
  return all;
}

}  // namespace optimizer::hopper
