// Square tiles on their way between tensors of different order, through shared memory.
//
// A thread moves kChunk elements of a line at once where the lines of a tensor are runs of memory that start where an
// access does, else one element. Neighbouring threads move neighbours in memory, so that their accesses combine.
#pragma once

#include "tiles.cuh"

namespace optimizer {

// The odd pitch keeps columns off one bank.
template <class T>
using Exchange = T[kTileSide][kTileSide + 1];

// Elements of a square tile that a thread moves, and chunks of them.
constexpr int kPlaces = kTileArea / kThreads;
constexpr int kThreadChunks = kPlaces / kChunk;
constexpr int kLineChunks = kTileSide / kChunk;

// Calls work(row, col, i) on the calling thread's elements of a box of one square tile, i counting them, neighbouring
// threads along the dimension in which the tensor lies closer; no division. The loop is unrolled kAtOnce times: more
// than once only where loads of several elements can be on their way together, as each copy looks at dtypes anew.
template <int kAtOnce = 1, class Work>
__device__ void for_each_place(const Box& box, const View& view, const Work& work) {
  const bool along_rows = lies_along_rows(view);
  const int lines = along_rows ? box.rows : box.cols, length = along_rows ? box.cols : box.rows;
  const int at = threadIdx.x % kTileSide;
#pragma unroll kAtOnce
  for (int i = 0; i < kPlaces; ++i) {
    const int line = i * (kThreads / kTileSide) + threadIdx.x / kTileSide;
    if (line < lines && at < length) {
      work(along_rows ? line : at, along_rows ? at : line, i);
    }
  }
}

// Calls work(chunk, i) on the calling thread's chunks of a box of one square tile, i counting them, along rows or
// columns; the loop is unrolled kAtOnce times. Which thread has which chunk depends on its place alone.
template <int kAtOnce = 1, class Work>
__device__ void for_each_chunk_of_tile(const Box& box, bool along_rows, const Work& work) {
  const int lines = along_rows ? box.rows : box.cols, length = along_rows ? box.cols : box.rows;
  const int at = threadIdx.x % kLineChunks * kChunk, count = min(kChunk, length - at);
#pragma unroll kAtOnce
  for (int i = 0; i < kThreadChunks; ++i) {
    const int line = i * (kThreads / kLineChunks) + threadIdx.x / kLineChunks;
    if (line < lines && count > 0) {
      work(Chunk{along_rows ? line : at, along_rows ? at : line, count, along_rows}, i);
    }
  }
}

template <class T>
__device__ void to_tile(Exchange<T>& tile, const T (&values)[kChunk], const Chunk& chunk) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    tile[chunk.row_of(i)][chunk.col_of(i)] = values[i];
  }
}

template <class T>
__device__ void from_tile(T (&values)[kChunk], const Exchange<T>& tile, const Chunk& chunk) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    values[i] = tile[chunk.row_of(i)][chunk.col_of(i)];
  }
}

// Brings a tensor's part of a box to shared memory. The dtype is looked at before the loops, and all elements of a
// thread are loaded before one is stored: a load after a store would wait for it, because the compiler cannot rule out
// that both access the same address. A barrier must follow.
template <class T>
__device__ void load_tile(Exchange<T>& tile, const View& view, ScalarType dtype, const Box& box, bool in_chunks) {
  const auto from = [&](int row, int col) { return address(view, dtype, box.row + row, box.col + col); };
  if (in_chunks) {
    T values[kThreadChunks][kChunk];
    with_stored_for<T>(dtype, [&](auto stored) {
      for_each_chunk_of_tile<kThreadChunks>(box, lies_along_rows(view), [&](const Chunk& at, int i) {
        load_as<T, decltype(stored)>(values[i], from(at.row, at.col), at.count, true);
      });
    });
    for_each_chunk_of_tile<kThreadChunks>(box, lies_along_rows(view),
                                          [&](const Chunk& at, int i) { to_tile(tile, values[i], at); });
  } else {
    T values[kPlaces];
    with_stored_for<T>(dtype, [&](auto stored) {
      for_each_place<kPlaces>(box, view, [&](int row, int col, int i) {
        values[i] = widen<T>(*reinterpret_cast<const decltype(stored)*>(from(row, col)));
      });
    });
    for_each_place<kPlaces>(box, view, [&](int row, int col, int i) { tile[row][col] = values[i]; });
  }
}

// Stores value(row, col) of each element of a box.
template <class T, class Value>
__device__ void store_tile(const Value& value, const View& view, ScalarType dtype, const Box& box, bool in_chunks) {
  const auto to = [&](int row, int col) { return address(view, dtype, box.row + row, box.col + col); };
  with_stored_for<T>(dtype, [&](auto stored) {
    using Stored = decltype(stored);
    if (in_chunks) {
      for_each_chunk_of_tile(box, lies_along_rows(view), [&](const Chunk& at, int) {
        T values[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
          values[k] = k < at.count ? value(at.row_of(k), at.col_of(k)) : T(0);
        }
        store_as<T, Stored>(values, to(at.row, at.col), at.count, true);
      });
    } else {
      for_each_place<4>(box, view, [&](int row, int col, int) {
        *reinterpret_cast<Stored*>(to(row, col)) = narrow<Stored>(value(row, col));
      });
    }
  });
}

}  // namespace optimizer
