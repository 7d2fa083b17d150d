// Equally shaped matrices walked together, cut into tiles: the geometry that the CPU and CUDA share.
#pragma once

#include "element.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace optimizer {

// 64 x 64 elements are read by rows and written by columns within the nearest cache (or shared memory);
// runs of as many elements keep the cost of finding a tile far below that of moving it.
constexpr int64_t kTileSide = 64;
constexpr int64_t kTileArea = kTileSide * kTileSide;

// Where the elements of a matrix are; strides count elements.
struct View {
  char* data;
  int64_t row_stride, col_stride;
};

OPTIMIZER_INLINE View transposed(const View& view) {
  return {view.data, view.col_stride, view.row_stride};
}

// Along which lines of a matrix squares are summed for its norm, if at all.
enum class Squares { kUnused, kByRows, kByColumns };

// The same lines, once rows have become columns.
inline Squares transposed(Squares squares) {
  const Squares other = squares == Squares::kByRows ? Squares::kByColumns : Squares::kByRows;
  return squares == Squares::kUnused ? squares : other;
}

// The N tensors, all of one shape, at one index of the lists.
template <int N>
struct Matrix {
  int64_t rows, cols;
  View views[N];
  int64_t index;  // in the list
  int64_t tile_rows, tile_cols;
  int64_t tiles_across, tiles;  // in a row of tiles, and in all
  int64_t first_tile;           // in the list
  Squares squares = Squares::kUnused;
};

// A rectangle of a matrix.
struct Box {
  int64_t row, col, rows, cols;
};

OPTIMIZER_INLINE int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// a / b, both numbers of tiles: fewer than 2^31 in a launch on a GPU, which takes about a hundred instructions to
// divide 64-bit integers.
OPTIMIZER_INLINE int64_t quotient_of_tiles(int64_t a, int64_t b) {
#ifdef __CUDA_ARCH__
  return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
#else
  return a / b;
#endif
}

template <int N>
OPTIMIZER_INLINE Box tile_box(const Matrix<N>& m, int64_t tile) {
  const int64_t number = tile - m.first_tile, down = quotient_of_tiles(number, m.tiles_across);
  const int64_t row = down * m.tile_rows, col = (number - down * m.tiles_across) * m.tile_cols;
  const int64_t rows = m.rows - row < m.tile_rows ? m.rows - row : m.tile_rows;
  const int64_t cols = m.cols - col < m.tile_cols ? m.cols - col : m.tile_cols;
  return {row, col, rows, cols};
}

inline bool is_half(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

inline bool is_floating(ScalarType dtype) {
  return is_half(dtype) || dtype == ScalarType::Float || dtype == ScalarType::Double;
}

OPTIMIZER_INLINE int64_t element_size(ScalarType dtype) {
  return dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : dtype == ScalarType::Char ? 1 : 2;
}

// Returns work(x) with some x of the type that tensors of this dtype store, a floating one or Short. The dtype is looked
// at once for many elements, so that code is compiled per dtype, not per combination of dtypes.
template <class Work>
OPTIMIZER_INLINE auto with_stored(ScalarType dtype, const Work& work) {
  switch (dtype) {
    case ScalarType::BFloat16: return work(c10::BFloat16{});
    case ScalarType::Half: return work(c10::Half{});
    case ScalarType::Double: return work(double{});
    case ScalarType::Short: return work(int16_t{});
    default: return work(float{});
  }
}

OPTIMIZER_INLINE char* address(const View& view, ScalarType dtype, int64_t row, int64_t col) {
  return view.data + (row * view.row_stride + col * view.col_stride) * element_size(dtype);
}

// The stride of a dimension with one element means nothing: it becomes that of a contiguous matrix.
OPTIMIZER_INLINE View make_view(char* data, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  return {data, rows == 1 ? cols : row_stride, cols == 1 ? 1 : col_stride};
}

template <int N>
OPTIMIZER_INLINE bool rows_are_runs(const Matrix<N>& m) {
  bool runs = true;
  for (const View& v : m.views) {
    runs &= v.col_stride == 1;
  }
  return runs;
}

template <int N>
OPTIMIZER_INLINE bool is_one_run(const Matrix<N>& m) {
  bool follow = true;
  for (const View& v : m.views) {
    follow &= v.row_stride == m.cols;
  }
  return follow && rows_are_runs(m);
}

// A contiguous matrix as a single row, so that short rows cost nothing.
template <int N>
OPTIMIZER_INLINE void collapse(Matrix<N>& m) {
  m.cols *= m.rows;
  m.rows = 1;
}

// Rows become columns.
template <int N>
void transpose(Matrix<N>& m) {
  std::swap(m.rows, m.cols);
  m.squares = transposed(m.squares);
  for (View& v : m.views) {
    v = transposed(v);
  }
}

// For elements that do not depend on their place: walks along the memory of the first tensor, which is read and
// written, so that only the others may have to be transposed on the way; as one run if all agree. In a single row
// squares could not be told apart by lines any more.
template <int N>
void simplify(Matrix<N>& m) {
  if (m.views[0].row_stride == 1 && m.views[0].col_stride != 1) {
    transpose(m);
  }
  if (is_one_run(m) && m.squares == Squares::kUnused) {
    collapse(m);
  }
}

// Tiles of whole rows or long parts of one where all rows are runs of memory, else square ones.
template <int N>
OPTIMIZER_INLINE void cut(Matrix<N>& m, bool by_runs) {
  const int64_t longest = m.cols < 1 ? 1 : m.cols < kTileArea ? m.cols : kTileArea;
  m.tile_cols = by_runs ? longest : kTileSide;
  m.tile_rows = by_runs ? kTileArea / m.tile_cols : kTileSide;
  m.tiles_across = ceil_div(m.cols, m.tile_cols);
  m.tiles = ceil_div(m.rows, m.tile_rows) * m.tiles_across;
}

}  // namespace optimizer
