// Tiles moved between tensors of any dtype and arrays of T.
#include "tiles.h"
#include "transpose.h"

namespace optimizer {
namespace {

template <class T>
OPTIMIZER_INLINE void load_rows(T* to, ScalarType dtype, const View& view, const Box& box) {
  with_stored(dtype, [&](auto stored) __attribute__((always_inline)) {
    load_rows<T, decltype(stored)>(to, view, box);
  });
}

template <class T>
OPTIMIZER_INLINE void store_rows(const T* from, ScalarType dtype, const View& view, const Box& box) {
  with_stored(dtype, [&](auto stored) __attribute__((always_inline)) {
    store_rows<T, decltype(stored)>(from, view, box);
  });
}

// Column-major tensors are read and written in the order of their memory.
template <class T>
OPTIMIZER_INLINE void load_box(T* to, ScalarType dtype, const View& view, const Box& box) {
  if (view.col_stride == 1 || view.row_stride != 1) {
    return load_rows(to, dtype, view, box);
  }
  T columns[kTileArea];
  load_rows(columns, dtype, {view.data, view.col_stride, 1}, {box.col, box.row, box.cols, box.rows});
  transpose(to, columns, box.cols, box.rows);
}

template <class T>
OPTIMIZER_INLINE void store_box(const T* from, ScalarType dtype, const View& view, const Box& box) {
  if (view.col_stride == 1 || view.row_stride != 1) {
    return store_rows(from, dtype, view, box);
  }
  T columns[kTileArea];
  transpose(columns, from, box.rows, box.cols);
  store_rows(columns, dtype, {view.data, view.col_stride, 1}, {box.col, box.row, box.cols, box.rows});
}

}  // namespace

OPTIMIZER_CLONES void load(float* to, ScalarType dtype, const View& view, const Box& box) {
  load_box(to, dtype, view, box);
}

OPTIMIZER_CLONES void load(double* to, ScalarType dtype, const View& view, const Box& box) {
  load_box(to, dtype, view, box);
}

OPTIMIZER_CLONES void store(const float* from, ScalarType dtype, const View& view, const Box& box) {
  store_box(from, dtype, view, box);
}

OPTIMIZER_CLONES void store(const double* from, ScalarType dtype, const View& view, const Box& box) {
  store_box(from, dtype, view, box);
}

}  // namespace optimizer
