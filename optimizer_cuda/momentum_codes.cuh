// Momentum in 8 bits on the GPU: quantize.h has the formula of a block of codes and its scale.
#pragma once

#include "momentum_pack.cuh"

namespace optimizer {

// Threads that share a block of codes, and how many neighbours each has of them.
constexpr int kSharers = kThreads / kTileSide;
constexpr int kCodes = kMomentumBlock / kSharers;
static_assert(kMomentumBlock == kTileSide && kCodes == sizeof(uint4));

struct alignas(uint4) Codes {
  int8_t code[kCodes];
};

__device__ inline Codes load_codes(const View& view, const Box& box, int row, int col, int count, bool aligned) {
  const char* from = address(view, ScalarType::Char, box.row + row, box.col + col);
  Codes codes{};
  if (aligned && count == kCodes) {
    *reinterpret_cast<uint4*>(&codes) = *reinterpret_cast<const uint4*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {  // unrolled, so that codes stay in registers
      if (i < count) {
        codes.code[i] = static_cast<int8_t>(from[i * view.col_stride]);
      }
    }
  }
  return codes;
}

__device__ inline void store_codes(const Codes& codes, const View& view, const Box& box, int row, int col, int count,
                                   bool aligned) {
  char* to = address(view, ScalarType::Char, box.row + row, box.col + col);
  if (aligned && count == kCodes) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&codes);
  } else {
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {
      if (i < count) {
        to[i * view.col_stride] = static_cast<char>(codes.code[i]);
      }
    }
  }
}

// Averages the gradients in `values`, which become updates, into momentum in 8 bits.
template <class T>
__device__ void average_codes(Exchange<T>& values, const PackEntry& entry, const Box& box,
                              const Averaging<T>& average) {
  __shared__ Magnitude<T> largest[kThreads];
  const View& view = entry.matrix.views[kMomentum];
  const int row = threadIdx.x / kSharers, col = threadIdx.x % kSharers * kCodes;
  const int count = row < box.rows ? max(0, min(kCodes, static_cast<int>(box.cols) - col)) : 0;
  float* const place = scale_of(entry.scales, box.row + row, box.col);
  T momentum[kCodes] = {};
  Magnitude<T> most = 0;
  if (count > 0) {
    const Codes codes = load_codes(view, box, row, col, count, entry.codes_are_aligned);
    const T scale = *place;
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {
      if (i < count) {
        momentum[i] = dequantize(static_cast<T>(codes.code[i]), scale);
        values[row][col + i] = average(momentum[i], values[row][col + i]);
        most = max(most, magnitude(momentum[i]));
      }
    }
  }
  largest[threadIdx.x] = most;
  __syncthreads();
  for (int i = 0; i < kSharers; ++i) {
    most = max(most, largest[row * kSharers + i]);
  }
  if (count > 0) {
    const float scale = make_scale<T>(most);
    Codes codes{};
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {
      codes.code[i] = static_cast<int8_t>(quantize(momentum[i], static_cast<T>(scale)));
    }
    store_codes(codes, view, box, row, col, count, entry.codes_are_aligned);
    if (col == 0) {
      *place = scale;
    }
  }
}

}  // namespace optimizer
