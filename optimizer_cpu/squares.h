// Squares on the CPU, summed in an order that follows from a matrix's size alone: the pass that reads a matrix and the
// one that makes it give its norm the same bits.
//
// A unit is kUnit neighbours along the rows of a matrix, or what is left of a row. Its squares go to kLanes sums in
// turn, and then the second half of these is added to the first, until one is left. The sums of all units, row by row,
// are added in the same way.
#pragma once

#include "call_memory.h"
#include "tiles.h"

namespace optimizer {

// Tiles begin at multiples of it, in rows and columns.
constexpr int64_t kUnit = kTileSide;
constexpr int64_t kLanes = 16;
static_assert(kTileArea % kUnit == 0 && kUnit % kLanes == 0);

// The sum of term(i) for all i < count.
template <class Term>
OPTIMIZER_INLINE double sum_of(int64_t count, const Term& term) {
  double lanes[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t first = 0; first < whole; first += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += term(first + lane);
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    lanes[i - whole] += term(i);
  }
#pragma GCC unroll 4
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

// The square of a float is exact in double: whether a compiler contracts a sum of squares changes no bit, and nothing
// overflows.
template <class T>
OPTIMIZER_INLINE double square(T x) {
  return static_cast<double>(x) * x;
}

// The sums of all units of `count` matrices. Different threads write those of different tiles.
class UnitSums {
 public:
  UnitSums(int64_t count, int64_t rows, int64_t cols)
      : count_(count),
        units_of_row_(ceil_div(cols, kUnit)),
        units_(rows * units_of_row_),
        memory_(count * units_ * sizeof(double)),
        sums_(reinterpret_cast<double*>(memory_.data())) {}

  // Takes the squares of a tile of matrix i, whose values are here row by row. They are exact floats even where T is
  // double.
  template <class T>
  OPTIMIZER_INLINE void take_values(int64_t i, const T* values, const Box& box) {
    const T* row = values;
    for (int64_t r = 0; r < box.rows; ++r, row += box.cols) {
      double* const sums = sums_ + i * units_ + (box.row + r) * units_of_row_ + box.col / kUnit;
      for (int64_t c = 0; c < box.cols; c += kUnit) {
        const auto term = [&](int64_t k) __attribute__((always_inline)) { return square(row[c + k]); };
        // A constant count is unrolled.
        sums[c / kUnit] = c + kUnit <= box.cols ? sum_of(kUnit, term) : sum_of(box.cols - c, term);
      }
    }
  }

  // Takes the squares of a tile of matrix i from memory.
  OPTIMIZER_INLINE void take(int64_t i, ScalarType dtype, const View& view, const Box& box) {
    float values[kTileArea];
    load(values, dtype, view, box);
    take_values(i, values, box);
  }

  // Takes them along the lines that m.squares names.
  template <int N>
  OPTIMIZER_INLINE void take_lines(const Matrix<N>& m, ScalarType dtype, const View& view, const Box& box) {
    if (m.squares == Squares::kByRows) {
      return take(m.index, dtype, view, box);
    }
    take(m.index, dtype, transposed(view), {box.col, box.row, box.cols, box.rows});
  }

  void write_norms(double* norms) const {
    share(count_, 1, count_ * units_, [&](const Range& one) {
      const double* const sums = sums_ + one.begin * units_;
      norms[one.begin] = std::sqrt(sum_of(units_, [&](int64_t unit) { return sums[unit]; }));
    });
  }

 private:
  int64_t count_, units_of_row_, units_;
  CallMemory memory_;
  double* sums_;
};

// For a list of wide or transposed matrices of one size; for nothing if no norms are wanted.
template <int N>
UnitSums unit_sums(const MaybeTensor& norms, const std::vector<Matrix<N>>& list) {
  if (!norms || list.empty()) {
    return UnitSums(0, 0, 0);
  }
  return UnitSums(list.size(), std::min(list[0].rows, list[0].cols), std::max(list[0].rows, list[0].cols));
}

// A contiguous matrix whose rows are whole units becomes a single row, so that short rows cost nothing.
template <int N>
void collapse_whole_units(Matrix<N>& m) {
  if (m.squares == Squares::kByRows && is_one_run(m) && m.cols % kUnit == 0) {
    collapse(m);
  }
}

}  // namespace optimizer
