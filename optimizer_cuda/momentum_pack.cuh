// What a launch of momentum_pack_ carries, and the average of one element.
#pragma once

#include "../optimizer_common/momentum_pack.h"
#include "squares.cuh"

namespace optimizer {

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

  // Writes the new average to m and returns what is packed. With a weight of 1 the new average is the gradient,
  // even if the old average was infinite or NaN.
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

}  // namespace optimizer
