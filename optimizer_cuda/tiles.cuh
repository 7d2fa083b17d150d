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

// Bytes of the widest access there is, and the elements that a thread moves at once: that many of half precision.
constexpr int kAccess = 16;
constexpr int kChunk = 8;

// Blocks that must fit on a multiprocessor at once, so that enough loads are on their way: of kernels that get by with
// 48 registers a thread, and of others. One of 7.5 holds 1024 threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
constexpr int kManyBlocks = 4;
#else
constexpr int kManyBlocks = 5;
#endif
constexpr int kFewBlocks = 3;

// A launch carries its matrices by value: no copy to the device that a captured graph would have to
// replay, no buffer to keep alive. Parameters may take 32764 bytes (CUDA 12.1 and later), of which
// this many matrices need up to five sixths; longer lists take several launches.
constexpr int kMatrices = 128;
constexpr int kMostParameterBytes = 32764;

// Whether neighbours in a row are at least as close in memory as those in a column.
OPTIMIZER_INLINE bool lies_along_rows(const View& view) { return view.col_stride <= view.row_stride; }

// Whether the lines along which a tensor lies are runs of memory, each of which starts where the widest access does.
template <int N>
bool lies_in_chunks(const Matrix<N>& m, int k, const ScalarType* dtypes) {
  const View& v = m.views[k];
  const bool along_rows = lies_along_rows(v);
  const int64_t inner = along_rows ? v.col_stride : v.row_stride, outer = along_rows ? v.row_stride : v.col_stride;
  const int64_t lines = along_rows ? m.rows : m.cols;
  return inner == 1 && (lines == 1 || outer * element_size(dtypes[k]) % kAccess == 0) &&
         reinterpret_cast<uintptr_t>(v.data) % kAccess == 0;
}

// A matrix in a launch.
template <int N>
struct Entry {
  Matrix<N> matrix;
  bool by_runs;       // tiles are whole rows or long parts of one, runs of memory in all tensors; else they are square
  bool in_chunks[N];  // of each tensor: whole chunks of its lines are moved in accesses of kAccess bytes
  bool is_direct;     // so are those of all tensors, along the same lines: no tile need go through shared memory
  bool is_open;       // as far as the host knows
};

// Whether whole chunks of all tensors are moved in the widest accesses, and their lines lie along the same dimension.
template <int N>
bool lies_directly(const Matrix<N>& m, const bool (&in_chunks)[N]) {
  bool direct = true;
  for (int k = 0; k < N; ++k) {
    direct &= in_chunks[k] && lies_along_rows(m.views[k]) == lies_along_rows(m.views[0]);
  }
  return direct;
}

template <int N>
void set_layout(Entry<N>& entry, const ScalarType* dtypes) {
  const Matrix<N>& m = entry.matrix;
  for (int k = 0; k < N; ++k) {
    entry.in_chunks[k] = lies_in_chunks(m, k, dtypes);
  }
  entry.is_direct = lies_directly(m, entry.in_chunks);
  entry.by_runs = rows_are_runs(m) && m.squares == Squares::kUnused;
}

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

// `with_stored` of floating dtypes, without that of double unless T is that: a kernel that computes in float has no
// tensor of doubles, and each dtype is code of its own.
template <class T, class Work>
__device__ auto with_stored_for(ScalarType dtype, const Work& work) {
  if constexpr (std::is_same_v<T, double>) {
    if (dtype == ScalarType::Double) {
      return work(double{});
    }
  }
  switch (dtype) {
    case ScalarType::BFloat16: return work(c10::BFloat16{});
    case ScalarType::Half: return work(c10::Half{});
    default: return work(float{});
  }
}

// Up to kChunk elements.
template <class T>
__device__ void load(T (&to)[kChunk], ScalarType dtype, const char* from, int count, bool aligned) {
  with_stored_for<T>(dtype, [&](auto stored) { load_as<T, decltype(stored)>(to, from, count, aligned); });
}

template <class T>
__device__ void store(const T (&from)[kChunk], ScalarType dtype, char* to, int count, bool aligned) {
  with_stored_for<T>(dtype, [&](auto stored) { store_as<T, decltype(stored)>(from, to, count, aligned); });
}

template <class T>
__device__ T load_one(ScalarType dtype, const char* from) {
  return with_stored_for<T>(
      dtype, [&](auto stored) { return widen<T>(*reinterpret_cast<const decltype(stored)*>(from)); });
}

template <class T>
__device__ void store_one(T from, ScalarType dtype, char* to) {
  with_stored_for<T>(dtype, [&](auto stored) {
    using Stored = decltype(stored);
    *reinterpret_cast<Stored*>(to) = narrow<Stored>(from);
  });
}

// Neighbours in memory, or as many as are left of a line of a box: from (row, col) on, along the row or the column.
struct Chunk {
  int row, col, count;
  bool along_rows;

  __device__ int row_of(int i) const { return along_rows ? row : row + i; }
  __device__ int col_of(int i) const { return along_rows ? col + i : col; }
};

// Calls work(chunk) on the calling thread's chunks of the rows of a box, which follow one another through the block.
template <class Work>
__device__ void for_each_chunk(const Box& box, const Work& work) {
  const int per_row = ceil_div(box.cols, kChunk);
  for (int k = threadIdx.x; k < box.rows * per_row; k += kThreads) {
    const int row = k / per_row, col = k % per_row * kChunk;
    work(Chunk{row, col, min(kChunk, static_cast<int>(box.cols) - col), true});
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
      set_layout(entry, call.dtypes);
      fill(entry);
      cut(entry.matrix, entry.by_runs);
      entry.matrix.first_tile = tiles;
      tiles += entry.matrix.tiles;
    }
    if (tiles > 0) {
      launch(kernel, parameters, tiles, call.device);
    }
  }
}

}  // namespace optimizer
