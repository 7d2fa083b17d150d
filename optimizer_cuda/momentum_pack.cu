// momentum_pack_ on the GPU: one pass over gradients, momentum and the packed batch, one thread block per tile.
//
// The formula of one element is in element.h, the checked arguments are in momentum_pack.h; tiles.cuh moves tiles and
// launches kernels. Tiles whose rows are runs of memory are moved in chunks, the others through shared memory.
#include "../optimizer_common/momentum_pack.h"
#include "tiles.cuh"

namespace optimizer {
namespace {

struct PackLaunch {
  Entry<3> entries[kMatrices];
  int count;
  ScalarType dtypes[3];
  double weight;
  bool nesterov, maximize;
  double grad_scale;
  Numbers device_grad_scale;  // in place of grad_scale, where given
  Gate device_gate;
};
static_assert(sizeof(PackLaunch) <= kMostParameterBytes);

template <class T>
struct Averaging {
  T weight, divisor;
  bool nesterov;

  // Writes the new average to m and returns what is packed.
  __device__ T operator()(T& m, T value) const {
    const T gradient = value / divisor;
    m = lerp(m, gradient, weight);
    return nesterov ? lerp(m, gradient, weight) : m;
  }
};

template <class T>
__device__ void pack_chunks(const PackLaunch& call, const Entry<3>& entry, const Box& box, const Averaging<T>& average,
                            bool is_open) {
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
  });
}

template <class T>
__device__ void pack_elements(const PackLaunch& call, const Matrix<3>& m, const Box& box, const Averaging<T>& average,
                              bool is_open) {
  __shared__ Exchange<T> updates;
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
  const Entry<3>& entry = find_entry(call, blockIdx.x);
  const Box box = tile_box(entry.matrix, blockIdx.x);
  const bool is_open = entry.is_open && call.device_gate.is_open(entry.matrix.index);
  const double scale = call.device_grad_scale.get(0, call.grad_scale);
  const Averaging<T> average{static_cast<T>(call.weight), gradient_divisor<T>(scale, call.maximize), call.nesterov};
  if (entry.by_runs) {
    pack_chunks(call, entry, box, average, is_open);
  } else {
    pack_elements(call, entry.matrix, box, average, is_open);
  }
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
  launch_all(call, parameters, call.in_double() ? pack<double> : pack<float>, [](Entry<3>&) {});
}

}  // namespace optimizer
