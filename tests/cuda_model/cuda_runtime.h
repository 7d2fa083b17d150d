// The CUDA runtime as far as optimizer_cuda/ uses it, for a C++ compiler: its kernels run on the CPU, by model.h.
//
// A launch `kernel<<<...>>>(parameters)` is no C++: tests/support/modelled_cuda.py writes a call of `launch` in its place,
// and lets the threads share what kernels take by value, as those of a GPU do.
#pragma once

#include "model.h"

#include <algorithm>

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;

// A launch that fails throws at once, and says why.
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

// Blocks run one after another, all on the thread that launches. Nothing else in the library is local to a thread, so
// that this memory is found, and poisoned, as a whole.
#define __shared__ static thread_local

#define threadIdx cuda_model::thread_index
#define blockIdx cuda_model::block_index
#define __syncthreads() cuda_model::barrier(__FILE__, __LINE__)

using std::max;
using std::min;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace cuda_model {

template <class Parameters>
void launch(void (*kernel)(const Parameters&), int64_t blocks, int threads, size_t, cudaStream_t stream,
            const Parameters& parameters) {
  // On a thread of the kernel, but not yet in it: it reads the memory of the host.
  const auto body = [&]() __attribute__((no_sanitize_address)) { kernel(parameters); };
  run({blocks, threads, stream, &parameters, sizeof(Parameters)}, body);
}

}  // namespace cuda_model
