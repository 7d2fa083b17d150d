// hopper_gemm_ on a GPU of compute capability 9.0: a symmetric product in tiles of 128 x 256, two blocks a cluster.
//
// The checked arguments are in hopper_gemm.h. hopper_squares.h says which squares there are, and which are summed in
// sections. hopper/roles.h says what the warps do, hopper/sections.h how sections are put together, hopper/result.h how a
// result is written, hopper/device.cuh how all that is done on the device.
#include "../optimizer_common/hopper_gemm.h"
#include "hopper/device.cuh"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <optional>

namespace optimizer {
namespace {

using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;

void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, " failed: CUDA error: ", cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

template <class Stride>
Stride stride_of(const Panels& panels) {
  Stride stride{};
  if constexpr (cute::is_static<decltype(cute::get<0>(stride))>::value) {
    cute::get<1>(stride) = panels.run_stride;
  } else {
    cute::get<0>(stride) = panels.run_stride;
  }
  cute::get<2>(stride) = panels.matrix_stride;
  return stride;
}

// C as a store sees it: a piece at a time, swizzled in shared memory. Either order of rows and columns is C itself.
CUtensorMap target_of(const HopperGemm& call) {
  const auto size = static_cast<cuuint64_t>(call.m);
  const cuuint64_t sizes[] = {size, size, static_cast<cuuint64_t>(call.count)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(call.c.run_stride) * kHalfBytes,
                                static_cast<cuuint64_t>(call.c.matrix_stride) * kHalfBytes};
  const cuuint32_t box[] = {hopper::kPiece, hopper::kPiece, 1}, steps[] = {1, 1, 1};
  const CUtensorMapDataType type =
      call.dtype == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  const CUresult error = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &map, type, 3, call.c.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(error == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", static_cast<int>(error));
  return map;
}

// Of sums of sections. Larger calls run in pieces, of one matrix at least.
constexpr int64_t kMostMemory = int64_t{64} << 20;

// Numbers of 4 bytes on a device. torch's ABI says that an allocation failed, but not why.
Tensor allocate(int64_t numbers, int32_t device) {
  try {
    return torch::stable::empty({numbers}, ScalarType::Float, std::nullopt,
                                torch::stable::Device(torch::headeronly::DeviceType::CUDA, device));
  } catch (const std::exception& error) {
    STD_TORCH_CHECK(false, "not enough memory for ", numbers * sizeof(float), " bytes of sums: ", error.what());
  }
}

// Where the sums of sections are kept, and behind them how many have arrived at each part of a square that is cut.
struct Memory {
  float* kept = nullptr;
  int* arrivals = nullptr;
};

template <class Mainloop>
hopper::Parameters<Mainloop> parameters_of(const HopperGemm& call, const hopper::Sections& sections,
                                           const Memory& memory) {
  using Element = typename Mainloop::ElementA;
  const int m = static_cast<int>(call.m), k = static_cast<int>(call.k), count = static_cast<int>(call.count);
  const typename Mainloop::Arguments operands{reinterpret_cast<const Element*>(call.a.data),
                                              stride_of<typename Mainloop::StrideA>(call.a),
                                              reinterpret_cast<const Element*>(call.b.data),
                                              stride_of<typename Mainloop::StrideB>(call.b)};
  const auto shape = cute::make_shape(m, m, k, count);
  return {.mainloop = Mainloop::to_underlying_arguments(shape, operands, nullptr),
          .target = target_of(call),
          .sections = sections,
          .kept = memory.kept,
          .arrivals = memory.arrivals,
          .result = hopper::result_of(call),
          .matrices = count,
          .k = k};
}

template <class Element, class LayoutA, class LayoutB>
void launch(const HopperGemm& call, const hopper::Sections& sections, const Memory& memory, cudaStream_t stream) {
  using Mainloop = hopper::MainloopFor<Element, LayoutA, LayoutB>;
  constexpr int kBlocks = cute::size(hopper::Cluster{}), kShared = sizeof(hopper::Shared<Mainloop>);
  const auto kernel = hopper::symmetric_kernel<Mainloop>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "cudaFuncSetAttribute");
  const hopper::Parameters<Mainloop> parameters = parameters_of<Mainloop>(call, sections, memory);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kBlocks, 1, 1};
  // A block takes a whole multiprocessor, and works on as long as there are sections.
  const int at_once = attribute(cudaDevAttrMultiProcessorCount, call.device) / kBlocks;
  const cudaLaunchConfig_t config{.gridDim = static_cast<unsigned>(std::min(sections.count, at_once) * kBlocks),
                                  .blockDim = hopper::kThreads,
                                  .dynamicSmemBytes = kShared,
                                  .stream = stream,
                                  .attrs = &cluster,
                                  .numAttrs = 1};
  check(cudaLaunchKernelEx(&config, kernel, parameters), "launch of hopper_gemm_");
}

template <class Element, class... Rest>
void launch_for(const HopperGemm& call, const Rest&... rest) {
  if (!call.a.along_k) {
    launch<Element, ColumnMajor, RowMajor>(call, rest...);
  } else if (call.b.along_k) {
    launch<Element, RowMajor, ColumnMajor>(call, rest...);
  } else {
    launch<Element, RowMajor, RowMajor>(call, rest...);
  }
}

// Every piece uses the same memory, which torch frees in the order of the stream.
void launch_pieces(const HopperGemm& call, cudaStream_t stream) {
  const auto sections_of = [&](int64_t matrices) {
    return hopper::sections_of_call(matrices, call.m, call.k, call.sections);
  };
  const hopper::Sections alone = sections_of(1);
  const int64_t each = hopper::kept_sums(alone.last, alone.sections);
  const int64_t fit = each > 0 ? kMostMemory / (each * sizeof(float)) : call.count;
  const int64_t together = std::clamp<int64_t>(fit, 1, call.count);
  const int64_t sums = together * each, parts = together * alone.last * hopper::kParts;
  std::optional<Tensor> numbers;
  Memory memory;
  if (sums > 0) {
    static_assert(sizeof(int) == sizeof(float));
    numbers = allocate(sums + parts, call.device);
    memory.kept = static_cast<float*>(numbers->mutable_data_ptr());
    memory.arrivals = reinterpret_cast<int*>(memory.kept + sums);
  }
  in_pieces(call, together, [&](const HopperGemm& piece) {
    if (sums > 0) {
      check(cudaMemsetAsync(memory.arrivals, 0, parts * sizeof(int), stream), "cudaMemsetAsync");
    }
    const hopper::Sections sections = sections_of(piece.count);
    call.dtype == ScalarType::Half ? launch_for<cutlass::half_t>(piece, sections, memory, stream)
                                   : launch_for<cutlass::bfloat16_t>(piece, sections, memory, stream);
  });
}

}  // namespace

void hopper_gemm_cuda(const HopperGemm& call) {
  if (call.count == 0 || call.m == 0) {
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, call.device);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor, call.device);
  STD_TORCH_CHECK(major == 9 && minor == 0, "hopper_gemm_ needs a device of compute capability 9.0, got ", major, ".",
                  minor);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(call.device, &stream));
  launch_pieces(call, static_cast<cudaStream_t>(stream));
}

}  // namespace optimizer
