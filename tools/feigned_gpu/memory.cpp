// Memory of the feigned runtime: blocks of the host's memory, and copies and fills that are done at once.
#include "feigned.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

using namespace feigned;

namespace {

struct Block {
  size_t size;
  int device;
  bool on_host;
};

// Larger blocks are not filled, because that would take their pages.
constexpr size_t kLargestFilled = size_t{1} << 28;

std::mutex mutex;
std::map<uintptr_t, Block> blocks;  // by their first address
std::map<int, size_t> used;         // bytes on each device

// New memory holds NaN in every floating-point format.
cudaError_t allocate(void** address, size_t bytes, bool on_host) {
  std::lock_guard<std::mutex> guard(mutex);
  *address = nullptr;
  const size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (!on_host && used[device] + size > kMemory) {
    return fail(cudaErrorMemoryAllocation);
  }
  if (size && !(*address = std::aligned_alloc(kAlignment, size))) {
    return fail(cudaErrorMemoryAllocation);
  }
  if (size <= kLargestFilled) {
    std::memset(*address, 0xFF, size);
  }
  if (size) {
    blocks[reinterpret_cast<uintptr_t>(*address)] = {size, device, on_host};
    used[device] += on_host ? 0 : size;
  }
  return cudaSuccess;
}

cudaError_t release(void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = blocks.find(reinterpret_cast<uintptr_t>(address));
  if (found == blocks.end()) {
    return address ? fail(cudaErrorInvalidValue) : cudaSuccess;
  }
  used[found->second.device] -= found->second.on_host ? 0 : found->second.size;
  blocks.erase(found);
  std::free(address);
  return cudaSuccess;
}

cudaError_t copied(void* to, const void* from, size_t bytes) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

}  // namespace

size_t feigned::used_on(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  return used[device];
}

extern "C" {

cudaError_t cudaMalloc(void** address, size_t bytes) { return allocate(address, bytes, false); }
cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return allocate(address, bytes, false); }
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) { return allocate(address, bytes, true); }
cudaError_t cudaFree(void* address) { return release(address); }
cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return release(address); }
cudaError_t cudaFreeHost(void* address) { return release(address); }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kMemory;
  *free = kMemory - used_on(device);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> guard(mutex);
  blocks[reinterpret_cast<uintptr_t>(address)] = {bytes, device, true};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  blocks.erase(reinterpret_cast<uintptr_t>(address));
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  *of = {};
  of->type = cudaMemoryTypeUnregistered;
  const uintptr_t place = reinterpret_cast<uintptr_t>(address);
  auto found = blocks.upper_bound(place);
  if (found != blocks.begin() && place < (--found)->first + found->second.size) {
    of->type = found->second.on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    of->device = found->second.device;
    of->devicePointer = of->hostPointer = const_cast<void*>(address);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  const cudaError_t error = waited(anything_is_captured());
  return error ? error : copied(to, from, bytes);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copied(to, from, bytes);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return copied(to, from, bytes);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < rows; ++row) {
    copied(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}

cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  std::memset(address, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(address, value, bytes);
}

}  // extern "C"
