// Small kernels, each with one defect that the model must tell, and one without any.
//
// `run` launches one of them by its name, over two arrays of as many numbers as a block has threads, and one of kTail
// more; it returns what was thrown, or nothing.
#include "cuda_runtime.h"

#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

namespace {

constexpr int kThreads = 64;

struct Numbers {
  float* to;          // of kThreads
  const float* from;  // of kThreads
  int* last;          // of one
};

// to[i] = from[kThreads - 1 - i], by way of shared memory.
template <bool has_barrier>
void turn(const Numbers& n) {
  __shared__ float line[kThreads];
  line[threadIdx.x] = n.from[threadIdx.x];
  if (has_barrier) {
    __syncthreads();
  }
  n.to[threadIdx.x] = line[kThreads - 1 - threadIdx.x];
}

void divergent_barrier(const Numbers& n) {
  n.to[threadIdx.x] = n.from[threadIdx.x];
  if (threadIdx.x != 5) {
    __syncthreads();
  }
}

void two_barriers(const Numbers& n) {
  n.to[threadIdx.x] = n.from[threadIdx.x];
  if (threadIdx.x < 5) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

// Four numbers at once, from the second one on.
void misaligned(const Numbers& n) {
  *reinterpret_cast<uint4*>(n.to) = *reinterpret_cast<const uint4*>(n.from + 1);
}

void index_behind_shared(const Numbers& n) {
  __shared__ float line[kThreads];
  line[threadIdx.x + 1] = n.from[threadIdx.x];
  __syncthreads();
  n.to[threadIdx.x] = line[threadIdx.x];
}

void read_behind(const Numbers& n) { n.to[threadIdx.x] = n.from[threadIdx.x + 1]; }

void write_before(const Numbers& n) { n.to[static_cast<int>(threadIdx.x) - 1] = n.from[threadIdx.x]; }

void write_input(const Numbers& n) { const_cast<float*>(n.from)[threadIdx.x] = 0; }

// Of all blocks the one that happens to be the last.
void block_order(const Numbers& n) { *n.last = static_cast<int>(blockIdx.x); }

const std::map<std::string, void (*)(const Numbers&)> kKernels = {
    {"right", turn<true>},
    {"missing_barrier", turn<false>},
    {"divergent_barrier", divergent_barrier},
    {"two_barriers", two_barriers},
    {"misaligned", misaligned},
    {"index_behind_shared", index_behind_shared},
    {"read_behind", read_behind},
    {"write_before", write_before},
    {"write_input", write_input},
    {"block_order", block_order},
    {"read_by_host", turn<true>},
    {"another_stream", turn<true>},
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* run(const char* name, uint64_t seed, int blocks,
                                                                  float* to, const float* from, int* last) {
  static std::string said;
  said.clear();
  cuda_model::seed(seed);
  cuda_model::allow(to, kThreads * sizeof(float), true);
  cuda_model::allow(from, kThreads * sizeof(float), false);
  cuda_model::allow(last, sizeof(int), true);
  const std::string kernel = name;
  void* const stream = kernel == "another_stream" ? nullptr : cuda_model::current_stream();
  [[maybe_unused]] const volatile float first = kernel == "read_by_host" ? from[0] : 0;
  try {
    cuda_model::launch(kKernels.at(kernel), blocks, kThreads, 0, stream, Numbers{to, from, last});
  } catch (const std::runtime_error& error) {
    said = error.what();
  }
  cuda_model::forget();
  return said.c_str();
}
