// Tiles on the CPU: moved between tensors and small arrays of T, and taken in turns by threads.
#pragma once

#include "../optimizer_common/matrices.h"
#include "threads.h"

#include <algorithm>
#include <vector>

// The published binary runs on every processor and chooses the fastest clone when it is loaded. A build for one machine
// may define this as nothing. GCC can choose between these levels since release 12.
#ifndef OPTIMIZER_CLONES
#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 12
#define OPTIMIZER_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define OPTIMIZER_CLONES
#endif
#endif

namespace optimizer {

// Elements, under which torch does not wake another thread for its own operations.
constexpr int64_t kGrain = 32768, kGrainTiles = kGrain / kTileArea;

// Calls work(range) until all of `count` tasks are taken, `grain` at a time, on a thread for each kGrain of their
// elements.
template <class Work>
void share(int64_t count, int64_t grain, int64_t elements, const Work& work) {
  const int64_t threads = std::clamp<int64_t>(elements / kGrain, 1, most_threads());
  take_turns(count, grain, threads, [&](int64_t, const auto& next) {
    for (Range some = next(); some.size() > 0; some = next()) {
      work(some);
    }
  });
}

template <class Work>
void share_tiles(int64_t tiles, const Work& work) {
  share(tiles, kGrainTiles, tiles * kTileArea, work);
}

template <class Stored>
OPTIMIZER_INLINE Stored* start_of(const View& view, const Box& box) {
  return reinterpret_cast<Stored*>(view.data) + box.row * view.row_stride + box.col * view.col_stride;
}

// Calls work(c) for all c < count. Short rows, such as those of a square tile, go in steps of 16 where that divides them:
// a loop of unknown length would spend longer on choosing its way than on the row. Lambdas must be inlined, since only
// then are they compiled for each clone.
template <class Work>
OPTIMIZER_INLINE void for_each_of_row(int64_t count, const Work& work) {
  constexpr int64_t kStep = 16;
  if (count <= kTileSide && count % kStep == 0) {
    for (int64_t first = 0; first < count; first += kStep) {
      for (int64_t i = 0; i < kStep; ++i) {
        work(first + i);
      }
    }
  } else {
    for (int64_t c = 0; c < count; ++c) {
      work(c);
    }
  }
}

// A row is prefetched so many rows before it is read: processors do not foresee where the next short row starts.
constexpr int64_t kRowsAhead = 8;
constexpr int64_t kLineBytes = 64;

template <class Stored>
OPTIMIZER_INLINE void prefetch_row(const Stored* from, int64_t count) {
  for (int64_t c = 0; c < count; c += kLineBytes / sizeof(Stored)) {
    __builtin_prefetch(from + c);
  }
}

// Runs of memory have a loop of their own, the one that compilers vectorise.
template <class T, class Stored>
OPTIMIZER_INLINE void load_rows(T* __restrict to, const View& view, const Box& box) {
  const Stored* from = start_of<Stored>(view, box);
  for (int64_t r = 0; r < box.rows; ++r, from += view.row_stride, to += box.cols) {
    if (view.col_stride == 1) {
      if (r + kRowsAhead < box.rows) {
        prefetch_row(from + kRowsAhead * view.row_stride, box.cols);
      }
      for_each_of_row(box.cols, [&](int64_t c) __attribute__((always_inline)) { to[c] = widen<T>(from[c]); });
    } else {
      for (int64_t c = 0; c < box.cols; ++c) {
        to[c] = widen<T>(from[c * view.col_stride]);
      }
    }
  }
}

template <class T, class Stored>
OPTIMIZER_INLINE void store_rows(const T* __restrict from, const View& view, const Box& box) {
  Stored* to = start_of<Stored>(view, box);
  for (int64_t r = 0; r < box.rows; ++r, from += box.cols, to += view.row_stride) {
    if (view.col_stride == 1) {
      for_each_of_row(box.cols, [&](int64_t c) __attribute__((always_inline)) { to[c] = narrow<Stored>(from[c]); });
    } else {
      for (int64_t c = 0; c < box.cols; ++c) {
        to[c * view.col_stride] = narrow<Stored>(from[c]);
      }
    }
  }
}

// Read or write a box of a tensor, row by row, as float or double. Compiled once, in tile_moves.cpp, not into each pass:
// a call for each tile costs little beside moving it, and compiling one copy takes seconds.
void load(float* to, ScalarType dtype, const View& view, const Box& box);
void load(double* to, ScalarType dtype, const View& view, const Box& box);
void store(const float* from, ScalarType dtype, const View& view, const Box& box);
void store(const double* from, ScalarType dtype, const View& view, const Box& box);

// A pass goes over its elements several times, by way of arrays of T. With so many elements at a time the nearest cache
// holds these arrays beside the memory that is moved.
constexpr int64_t kPartLength = 512;
static_assert(kPartLength % kTileSide == 0);

// Calls work(part) for each part of each row of a box with long rows, and otherwise for the whole box.
template <class Work>
OPTIMIZER_INLINE void for_each_part(const Box& box, const Work& work) {
  if (box.cols <= kPartLength) {
    return work(box);
  }
  for (int64_t row = 0; row < box.rows; ++row) {
    for (int64_t col = 0; col < box.cols; col += kPartLength) {
      work(Box{box.row + row, box.col + col, 1, std::min(kPartLength, box.cols - col)});
    }
  }
}

// Cuts a list into tiles and calls work(matrix, box) for each part of each of them, in any order.
template <int N, class Work>
void for_each_tile(std::vector<Matrix<N>> list, const Work& work) {
  int64_t tiles = 0;
  for (Matrix<N>& m : list) {
    cut(m, rows_are_runs(m) && m.squares != Squares::kByColumns);
    m.first_tile = tiles;
    tiles += m.tiles;
  }
  share_tiles(tiles, [&](const Range& some) {
    const auto starts_later = [](int64_t tile, const Matrix<N>& m) { return tile < m.first_tile; };
    for (int64_t tile = some.begin; tile < some.end; ++tile) {
      // The last matrix that starts at or before the tile: empty ones start there too, but sooner.
      const Matrix<N>& m = *(std::upper_bound(list.begin(), list.end(), tile, starts_later) - 1);
      for_each_part(tile_box(m, tile), [&](const Box& part) { work(m, part); });
    }
  });
}

}  // namespace optimizer
