// In the place of CUDA's runtime and driver, and of torch for CUDA: what is asked is kept, and nothing is started.
//
// Tensors and memory are on the CPU, and say that they are on device kDevice. A test may ask that one of the functions
// fails, by its name. As in tests/cuda_model, the linker puts `__wrap_f` in the place of torch's `f`.
#include "../../optimizer_common/hopper_gemm.h"
#include "host.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>

namespace {

constexpr int32_t kDevice = 3, kNone = -1;
constexpr uintptr_t kStream = 0x5000;
// What the driver takes.
constexpr uint64_t kMostSize = uint64_t{1} << 32, kStrideLimit = uint64_t{1} << 40;
constexpr uint32_t kMostRank = 5, kMostBox = 256, kSwizzledBytes = 128;

std::string told;
std::string failing;
int multiprocessors = 132, major = 9, minor = 0;
int32_t guarded = kNone;

cudaError_t outcome(const char* name) { return failing == name ? cudaErrorUnknown : cudaSuccess; }

void product(const optimizer::Tensor& c, const optimizer::Tensor& a, const optimizer::Tensor& b,
             const optimizer::MaybeTensor& d, double alpha, double beta, double diagonal, int64_t sections) {
  optimizer::hopper_gemm_cuda(optimizer::check_hopper_gemm(c, a, b, d, alpha, beta, diagonal, sections));
}

bool fits(const hopper_host::Map& map, const cuuint32_t* steps) {
  const auto all = [](const auto* first, int count, const auto& holds) {
    return std::all_of(first, first + count, holds);
  };
  return map.address % 16 == 0 && all(map.sizes, map.rank, [](uint64_t n) { return n > 0 && n <= kMostSize; }) &&
         all(map.strides, map.rank - 1, [](uint64_t n) { return n % 16 == 0 && n < kStrideLimit; }) &&
         all(map.box, map.rank, [](uint32_t n) { return n > 0 && n <= kMostBox; }) &&
         all(steps, map.rank, [](cuuint32_t n) { return n == 1; }) && map.box[0] * 2 <= kSwizzledBytes;
}

}  // namespace

void hopper_host::tell(const std::string& what, const Numbers& numbers) {
  told += what;
  for (const int64_t number : numbers) {
    told += " " + std::to_string(number);
  }
  told += "\n";
}

STABLE_TORCH_LIBRARY(hopper_host, operations) {
  operations.def(
      "product(Tensor(a!) C, Tensor A, Tensor B, Tensor? D, float alpha, float beta, float diagonal, int sections) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hopper_host, CPU, operations) { operations.impl("product", TORCH_BOX(&product)); }

extern "C" {

// What was asked since the last call of `begin`: a line each.
__attribute__((visibility("default"))) const char* hopper_host_told() { return told.c_str(); }

// The device that is current: kNone outside of calls.
__attribute__((visibility("default"))) int hopper_host_device() { return guarded; }

__attribute__((visibility("default"))) void hopper_host_begin(int processors, int of_major, int of_minor,
                                                              const char* fail) {
  told.clear();
  failing = fail;
  multiprocessors = processors;
  major = of_major;
  minor = of_minor;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int device) {
  if (device != kDevice) {
    return cudaErrorInvalidDevice;
  }
  *value = std::map<int, int>{{cudaDevAttrMultiProcessorCount, multiprocessors},
                              {cudaDevAttrComputeCapabilityMajor, major},
                              {cudaDevAttrComputeCapabilityMinor, minor}}
               .at(name);
  return outcome("cudaDeviceGetAttribute");
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidDevice ? "no such device" : "it was told to fail";
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute name, int value) {
  hopper_host::tell("allow", {reinterpret_cast<int64_t>(kernel), name, value});
  return outcome("cudaFuncSetAttribute");
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  hopper_host::tell("set", {reinterpret_cast<int64_t>(data), value, static_cast<int64_t>(bytes),
                            reinterpret_cast<int64_t>(stream), guarded});
  return outcome("cudaMemsetAsync");
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** parameters) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  hopper_host::tell("launch", {reinterpret_cast<int64_t>(kernel), grid.x, grid.y * grid.z, block.x, block.y * block.z,
                               static_cast<int64_t>(config->dynamicSmemBytes),
                               reinterpret_cast<int64_t>(config->stream), guarded});
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const auto& size = config->attrs[i].val.clusterDim;
    hopper_host::tell("attribute", {config->attrs[i].id, size.x, size.y, size.z});
  }
  hopper_host::tell_parameters(kernel, parameters[0]);
  return outcome("cudaLaunchKernelExC");
}

CUresult encode(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank == 0 || rank > kMostRank) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  hopper_host::Map map{.address = reinterpret_cast<uint64_t>(data),
                       .rank = static_cast<uint8_t>(rank),
                       .type = static_cast<uint8_t>(type),
                       .swizzle = static_cast<uint8_t>(swizzle)};
  std::copy_n(sizes, rank, map.sizes);
  std::copy_n(strides, rank - 1, map.strides);
  std::copy_n(box, rank, map.box);
  std::memcpy(to, &map, sizeof map);
  return failing == "cuTensorMapEncodeTiled" || !fits(map, steps) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  const bool known = std::string(name) == "cuTensorMapEncodeTiled";
  *function = known ? reinterpret_cast<void*>(&encode) : nullptr;
  *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// What nvcc's code asks for when it is loaded, and for launches by `<<<>>>`, of which there are none.
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }

AOTITorchError __wrap_aoti_torch_get_device_type(AtenTensorHandle, int32_t* type) {
  *type = aoti_torch_device_type_cuda();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_get_device_index(AtenTensorHandle, int32_t* index) {
  *index = kDevice;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  guarded = device;
  *guard = reinterpret_cast<DeviceGuardHandle>(&guarded);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_delete_device_guard(DeviceGuardHandle) {
  guarded = kNone;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(kStream + device);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __real_torch_call_dispatcher(const char*, const char*, StableIValue*, uint64_t);

// Of torch's operations only `empty` is called: it gives memory of the CPU for that of a device.
AOTITorchError __wrap_torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack,
                                            uint64_t version) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  const auto device = to<std::optional<torch::stable::Device>>(stack[3]).value();
  stack[3] = from(std::nullopt);
  if (std::string(name) != "aten::empty" || failing == name) {
    return AOTI_TORCH_FAILURE;
  }
  const AOTITorchError error = __real_torch_call_dispatcher(name, overload, stack, version);
  const AtenTensorHandle made = to<AtenTensorHandle>(stack[0]);
  int64_t bytes = 0;
  void* data = nullptr;
  aoti_torch_get_storage_size(made, &bytes);
  aoti_torch_get_data_ptr(made, &data);
  hopper_host::tell("allocate", {reinterpret_cast<int64_t>(data), bytes, device.index(), device.is_cuda()});
  return error;
}

}  // extern "C"
