// momentum_pack_ on the GPU: one pass over gradients, momentum and the packed batch, one thread block per tile.
//
// The formula of one element is in element.h, the checked arguments are in momentum_pack.h; tiles.cuh moves tiles and
// launches kernels. Tiles whose rows are runs of memory are moved in chunks, the others through shared memory, as are
// those of momentum in 8 bits, of which quantize.h has the formula. Where norms are wanted, squares.cuh sums the squares
// of what is packed.
#include "../optimizer_common/momentum_pack.h"
#include "squares.cuh"

namespace optimizer {
namespace {

struct PackEntry : Entry<3> {
  View scales;             // of momentum in 8 bits
  bool codes_are_aligned;  // so that one access takes those of a thread
};

struct PackLaunch {
  PackEntry entries[kMatrices];
  int count;
  ScalarType dtypes[3];
  double weight;
  bool nesterov, maximize;
  double grad_scale;
  Numbers device_grad_scale;  // in place of grad_scale, where given
  Gate device_gate;
  double* sums;  // of each tile's squares, where norms are wanted
};
static_assert(sizeof(PackLaunch) <= kMostParameterBytes);

template <class T>
struct Averaging {
  T weight, divisor;
  bool nesterov;

  // Writes the new average to m and returns what is packed. With a weight of 1 nothing of the average is left, be it
  // infinite or NaN.
  __device__ T operator()(T& m, T value) const {
    const T gradient = value / divisor;
    if (weight == 1) {
      return m = gradient;
    }
    m = lerp(m, gradient, weight);
    return nesterov ? lerp(m, gradient, weight) : m;
  }
};

template <class T>
__device__ Averaging<T> make_averaging(const PackLaunch& call) {
  const double scale = call.device_grad_scale.get(0, call.grad_scale);
  return {static_cast<T>(call.weight), gradient_divisor<T>(scale, call.maximize), call.nesterov};
}

// `updates` is written only where squares are summed.
template <class T>
__device__ void pack_chunks(Exchange<T>& updates, const PackLaunch& call, const Entry<3>& entry, const Box& box,
                            const Averaging<T>& average, bool is_open) {
  const Matrix<3>& m = entry.matrix;
  for_each_chunk(box, [&](int row, int col, int count) {
    const auto at = [&](int k) { return address(m.views[k], call.dtypes[k], box.row + row, box.col + col); };
    T momentum[kChunk], update[kChunk] = {};
    if (is_open) {
      load(momentum, call.dtypes[kMomentum], at(kMomentum), count, entry.aligned);
      load(update, call.dtypes[kGradient], at(kGradient), count, entry.aligned);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        update[i] = average(momentum[i], update[i]);
      }
      store(momentum, call.dtypes[kMomentum], at(kMomentum), count, entry.aligned);
    }
    store(update, call.dtypes[kPacked], at(kPacked), count, entry.aligned);
    if (call.sums) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        updates[row][col + i] = update[i];
      }
    }
  });
  if (call.sums) {
    __syncthreads();
  }
}

template <class T>
__device__ void pack_elements(Exchange<T>& updates, const PackLaunch& call, const Matrix<3>& m, const Box& box,
                              const Averaging<T>& average, bool is_open) {
  const auto at = [&](int k, int row, int col) {
    return address(m.views[k], call.dtypes[k], box.row + row, box.col + col);
  };
  for_each_element(box, m.views[kMomentum], [&](int row, int col) {
    updates[row][col] = 0;
    if (is_open) {
      T momentum = load_one<T>(call.dtypes[kMomentum], at(kMomentum, row, col));
      updates[row][col] = average(momentum, load_one<T>(call.dtypes[kGradient], at(kGradient, row, col)));
      store_one(momentum, call.dtypes[kMomentum], at(kMomentum, row, col));
    }
  });
  __syncthreads();
  for_each_element(box, m.views[kPacked], [&](int row, int col) {
    store_one(updates[row][col], call.dtypes[kPacked], at(kPacked, row, col));
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ PackLaunch call) {
  __shared__ Exchange<T> updates;
  const PackEntry& entry = find_entry(call, blockIdx.x);
  const Box box = tile_box(entry.matrix, blockIdx.x);
  const bool is_open = entry.is_open && call.device_gate.is_open(entry.matrix.index);
  const Averaging<T> average = make_averaging<T>(call);
  if (entry.by_runs) {
    pack_chunks(updates, call, entry, box, average, is_open);
  } else {
    pack_elements(updates, call, entry.matrix, box, average, is_open);
  }
  if (call.sums) {
    write_tile_sum(call.sums, updates, call.dtypes[kPacked], entry.matrix, box);
  }
}

// Threads that share a block of codes, and how many neighbours each has of them.
constexpr int kSharers = kThreads / kTileSide;
constexpr int kCodes = kMomentumBlock / kSharers;
static_assert(kMomentumBlock == kTileSide && kCodes == sizeof(uint4));

struct alignas(uint4) Codes {
  int8_t code[kCodes];
};

__device__ Codes load_codes(const View& view, const Box& box, int row, int col, int count, bool aligned) {
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

__device__ void store_codes(const Codes& codes, const View& view, const Box& box, int row, int col, int count,
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

template <class T>
__global__ void __launch_bounds__(kThreads) pack_codes(const __grid_constant__ PackLaunch call) {
  __shared__ Exchange<T> values;
  const PackEntry& entry = find_entry(call, blockIdx.x);
  const Matrix<3>& m = entry.matrix;
  const Box box = tile_box(m, blockIdx.x);
  const bool is_open = entry.is_open && call.device_gate.is_open(m.index);
  const auto at = [&](int k, int row, int col) {
    return address(m.views[k], call.dtypes[k], box.row + row, box.col + col);
  };
  for_each_place(box, m.views[kGradient], [&](int row, int col, int) {
    values[row][col] = is_open ? load_one<T>(call.dtypes[kGradient], at(kGradient, row, col)) : T(0);
  });
  __syncthreads();
  if (is_open) {
    average_codes(values, entry, box, make_averaging<T>(call));
    __syncthreads();
  }
  for_each_place(box, m.views[kPacked], [&](int row, int col, int) {
    store_one(values[row][col], call.dtypes[kPacked], at(kPacked, row, col));
  });
  if (call.sums) {
    write_tile_sum(call.sums, values, call.dtypes[kPacked], m, box);
  }
}

// Square tiles, whose rows are a block each.
void launch_codes(const MomentumPack& call, PackLaunch& parameters) {
  const auto kernel = call.in_double() ? pack_codes<double> : pack_codes<float>;
  launch_all(call, parameters, kernel, [&](PackEntry& entry) {
    const View& codes = entry.matrix.views[kMomentum];
    entry.by_runs = false;
    entry.scales = call.scales[entry.matrix.index];
    entry.codes_are_aligned = codes.col_stride == 1 && codes.row_stride % sizeof(uint4) == 0 &&
                              reinterpret_cast<uintptr_t>(codes.data) % sizeof(uint4) == 0;
  });
}

void launch_pack(const MomentumPack& call, PackLaunch& parameters) {
  if (!call.scales.empty()) {
    return launch_codes(call, parameters);
  }
  launch_all(call, parameters, call.in_double() ? pack<double> : pack<float>, [](PackEntry&) {});
}

}  // namespace

void momentum_pack_cuda(const MomentumPack& call) {
  PackLaunch parameters{};
  std::copy_n(call.dtypes, 3, parameters.dtypes);
  parameters.weight = call.weight;
  parameters.nesterov = call.nesterov;
  parameters.maximize = call.maximize;
  parameters.grad_scale = call.grad_scale.where(kHost).get(0, 1);
  parameters.device_grad_scale = call.grad_scale.where(kDevice);
  parameters.device_gate = call.gate.where(kDevice);
  launch_with_norms(call, parameters, [&] { launch_pack(call, parameters); });
}

}  // namespace optimizer
