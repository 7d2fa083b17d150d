// Tiles on the GPU: one block each, all tiles of up to kMatrices matrices in one launch.
#pragma once

#include "../optimizer_common/numbers.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/Exception.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

namespace optimizer {

constexpr int kThreads = 256;

// Elements that a thread moves at once: 16 bytes of half precision, the widest access there is.
constexpr int kChunk = 8;

// A launch carries its matrices by value: no copy to the device that a captured graph would have to
// replay, no buffer to keep alive. Parameters may take 32764 bytes (CUDA 12.1 and later), of which
// this many matrices need up to two thirds; longer lists take several launches.
constexpr int kMatrices = 128;
constexpr int kMostParameterBytes = 32764;

// Whether every whole chunk of a row starts where one access can take it.
template <int N>
bool chunks_are_aligned(const Matrix<N>& m, const ScalarType* dtypes) {
  constexpr int64_t kBytes = 16;
  for (int k = 0; k < N; ++k) {
    const View& v = m.views[k];
    const bool rows_aligned = m.rows == 1 || v.row_stride * element_size(dtypes[k]) % kBytes == 0;
    if (!rows_aligned || reinterpret_cast<uintptr_t>(v.data) % kBytes != 0) {
      return false;
    }
  }
  return true;
}

// A matrix in a launch.
template <int N>
struct Entry {
  Matrix<N> matrix;
  bool by_runs;  // all its rows are runs of memory, moved in chunks
  bool aligned;  // and whole chunks in one access
  bool is_open;  // as far as the host knows
};

// Which of `count` holds the block's tile: the last that starts at or before it, as empty ones start sooner.
template <class FirstTile>
__device__ int last_start(int count, int64_t tile, const FirstTile& first_tile) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_tile(middle) <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class Launch>
__device__ const auto& find_entry(const Launch& call, int64_t tile) {
  return call.entries[last_start(call.count, tile, [&](int i) { return call.entries[i].matrix.first_tile; })];
}

template <class T, class Stored>
__device__ void load_as(T (&to)[kChunk], const char* from, int count, bool aligned) {
  if (aligned && count == kChunk) {
    alignas(16) Stored chunk[kChunk];
#pragma unroll
    for (int i = 0; i < sizeof(chunk) / 16; ++i) {
      reinterpret_cast<uint4*>(chunk)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      to[i] = widen<T>(chunk[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      to[i] = i < count ? widen<T>(reinterpret_cast<const Stored*>(from)[i]) : T(0);
    }
  }
}

template <class T, class Stored>
__device__ void store_as(const T (&from)[kChunk], char* to, int count, bool aligned) {
  if (aligned && count == kChunk) {
    alignas(16) Stored chunk[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      chunk[i] = narrow<Stored>(from[i]);
    }
#pragma unroll
    for (int i = 0; i < sizeof(chunk) / 16; ++i) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(chunk)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < count) {
        reinterpret_cast<Stored*>(to)[i] = narrow<Stored>(from[i]);
      }
    }
  }
}

// Up to kChunk elements.
template <class T>
__device__ void load(T (&to)[kChunk], ScalarType dtype, const char* from, int count, bool aligned) {
  with_stored(dtype, [&](auto stored) { load_as<T, decltype(stored)>(to, from, count, aligned); });
}

template <class T>
__device__ void store(const T (&from)[kChunk], ScalarType dtype, char* to, int count, bool aligned) {
  with_stored(dtype, [&](auto stored) { store_as<T, decltype(stored)>(from, to, count, aligned); });
}

template <class T>
__device__ T load_one(ScalarType dtype, const char* from) {
  return with_stored(dtype, [&](auto stored) { return widen<T>(*reinterpret_cast<const decltype(stored)*>(from)); });
}

template <class T>
__device__ void store_one(T from, ScalarType dtype, char* to) {
  with_stored(dtype, [&](auto stored) {
    using Stored = decltype(stored);
    *reinterpret_cast<Stored*>(to) = narrow<Stored>(from);
  });
}

// Calls work(row, col, count) on the calling thread's chunks of a box, which follow one another through the block.
template <class Work>
__device__ void for_each_chunk(const Box& box, const Work& work) {
  const int per_row = ceil_div(box.cols, kChunk);
  for (int k = threadIdx.x; k < box.rows * per_row; k += kThreads) {
    const int row = k / per_row, col = k % per_row * kChunk;
    work(row, col, min(kChunk, static_cast<int>(box.cols) - col));
  }
}

// Calls work(row, col) on the calling thread's elements of a box, neighbouring threads along the
// dimension in which the tensor lies closer, so that their accesses combine.
template <class Work>
__device__ void for_each_element(const Box& box, const View& view, const Work& work) {
  const bool along_rows = view.col_stride <= view.row_stride;
  const int rows = box.rows, cols = box.cols;
  for (int k = threadIdx.x; k < rows * cols; k += kThreads) {
    work(along_rows ? k / cols : k % rows, along_rows ? k % cols : k / rows);
  }
}

// A square tile on its way between tensors of different order; the odd pitch keeps columns off one bank.
template <class T>
using Exchange = T[kTileSide][kTileSide + 1];

// Elements of a square tile that a thread moves.
constexpr int kPlaces = kTileArea / kThreads;

// Calls work(row, col, i) on the calling thread's elements of a box of one square tile, i counting them, neighbouring
// threads along the dimension in which the tensor lies closer; no division.
template <class Work>
__device__ void for_each_place(const Box& box, const View& view, const Work& work) {
  const bool along_rows = view.col_stride <= view.row_stride;
  const int lines = along_rows ? box.rows : box.cols, length = along_rows ? box.cols : box.rows;
  const int at = threadIdx.x % kTileSide;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const int line = i * (kThreads / kTileSide) + threadIdx.x / kTileSide;
    if (line < lines && at < length) {
      work(along_rows ? line : at, along_rows ? at : line, i);
    }
  }
}

template <class Launch>
void launch(void (*kernel)(Launch), const Launch& parameters, int64_t tiles, int32_t device) {
  STD_TORCH_CHECK(tiles <= std::numeric_limits<int32_t>::max(), parameters.count, " matrices make ", tiles,
                  " tiles, more than a launch can have");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  kernel<<<static_cast<unsigned>(tiles), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(parameters);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "launch of ", tiles, " blocks failed: ", cudaGetErrorString(error));
}

// Launches the kernel over all matrices of a call; `fill` sets what only this op has in an entry.
template <class Call, class Launch, class Fill>
void launch_all(const Call& call, Launch& parameters, void (*kernel)(Launch), const Fill& fill) {
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  const Gate gate = call.gate.where(kHost);
  const int64_t matrices = call.matrices.size();
  for (int64_t first = 0; first < matrices; first += kMatrices) {
    parameters.count = std::min<int64_t>(kMatrices, matrices - first);
    int64_t tiles = 0;
    for (int i = 0; i < parameters.count; ++i) {
      auto& entry = parameters.entries[i];
      entry.matrix = call.matrices[first + i];
      entry.is_open = gate.is_open(first + i);
      const bool sums_squares = entry.matrix.squares != Squares::kUnused;
      entry.aligned = chunks_are_aligned(entry.matrix, call.dtypes);
      // Square tiles have short rows: if no wide access fits, neighbouring threads are better on neighbouring elements.
      entry.by_runs = rows_are_runs(entry.matrix) && (entry.aligned || !sums_squares);
      fill(entry);
      cut(entry.matrix, entry.by_runs && !sums_squares);
      entry.matrix.first_tile = tiles;
      tiles += tile_count(entry.matrix);
    }
    if (tiles > 0) {
      launch(kernel, parameters, tiles, call.device);
    }
  }
}

}  // namespace optimizer
