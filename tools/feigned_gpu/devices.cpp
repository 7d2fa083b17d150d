// Devices of the feigned runtime: as many H100 as FEIGNED_GPUS says, and their errors.
#include "feigned.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

using namespace feigned;

namespace {

int devices() {
  const char* count = std::getenv("FEIGNED_GPUS");
  return count ? std::atoi(count) : 1;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* number) {
  *number = device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
  if (number < 0 || number >= devices()) {
    return fail(cudaErrorInvalidDevice);
  }
  device = number;
  return cudaSuccess;
}

// Those of an H100 SXM.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int number) {
  *of = {};
  std::strcpy(of->name, "NVIDIA H100 80GB HBM3");
  std::memset(&of->uuid, number + 1, sizeof of->uuid);
  of->totalGlobalMem = kMemory;
  of->major = 9;
  of->multiProcessorCount = 132;
  of->warpSize = 32;
  of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
  of->maxThreadsPerMultiProcessor = 2048;
  of->regsPerBlock = of->regsPerMultiprocessor = 65536;
  of->sharedMemPerBlock = 49152;
  of->sharedMemPerBlockOptin = 232448;
  of->sharedMemPerMultiprocessor = 233472;
  of->l2CacheSize = 50 << 20;
  of->maxGridSize[0] = 2147483647;
  of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->textureAlignment = kAlignment;
  of->unifiedAddressing = of->concurrentKernels = 1;
  of->pciBusID = number + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const std::map<int, int> values = {{cudaDevAttrComputeCapabilityMajor, 9},
                                     {cudaDevAttrComputeCapabilityMinor, 0},
                                     {cudaDevAttrMultiProcessorCount, 132},
                                     {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}};
  const auto known = values.find(attribute);
  *value = known == values.end() ? 1 : known->second;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int number) {
  std::snprintf(id, size, "0000:%02x:00.0", number + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t) { return "an error of a feigned GPU"; }

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation            ? "out of memory"
         : error == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
         : error == cudaErrorStreamCaptureInvalidated ? "operation failed due to a previous error during capture"
                                                       : "a feigned GPU cannot do that";
}

}  // extern "C"
