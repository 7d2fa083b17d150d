// Streams, events, captures and launches of the feigned runtime.
//
// Everything is done in the order of the calls, so streams and events need no order. A capture is known by a number, which
// is also its graph and what is launched. `feign_callbacks` tells of launches and of graphs that end: operations.py
// records what a capture skips, and does it at a launch.
#include "feigned.h"

#include <cuda.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

using namespace feigned;

namespace {

struct Event {
  double milliseconds = 0;
  bool is_recorded = false;
};

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

std::recursive_mutex mutex;  // a callback may ask for the capture of a stream
std::map<cudaStream_t, int> captures;
std::set<cudaStream_t> broken;  // of those that are captured
std::map<cudaStream_t, int> priorities;
int last_capture = 0;
void (*on_end)(int) = nullptr;
void (*on_launch)(int) = nullptr;
thread_local Configuration pushed;

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool is_captured(cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  return captures.count(stream);
}

cudaError_t launched(dim3 grid, dim3 block, size_t shared) {
  const bool fits = grid.x && grid.y && grid.z && block.x && block.y && block.z && grid.y <= 65535 && grid.z <= 65535;
  return fits && block.x * block.y * block.z <= 1024 && shared <= 232448 ? cudaSuccess
                                                                        : fail(cudaErrorInvalidConfiguration);
}

}  // namespace

bool feigned::anything_is_captured() {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  return !captures.empty();
}

void feigned::break_captures() {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  for (const auto& [stream, number] : captures) {
    broken.insert(stream);
  }
}

extern "C" {

void feign_callbacks(void (*end)(int), void (*launch)(int)) {
  on_end = end;
  on_launch = launch;
}

// The number of the capture that a stream is in, 0 without one.
int feigned_capture(cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  const auto found = captures.find(stream);
  return found == captures.end() ? 0 : found->second;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}

char __cudaInitModule(void**) { return 1; }

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  return launched(grid, block, shared);
}

cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  return launched(grid, block, shared);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return launched(config->gridDim, config->blockDim, config->dynamicSmemBytes);
}

cudaError_t cudaDeviceSynchronize() { return waited(anything_is_captured()); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return waited(is_captured(stream)); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return waited(is_captured(stream)); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return waited(anything_is_captured()); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  *stream = reinterpret_cast<cudaStream_t>(new char);
  priorities[*stream] = priority;
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  *priority = priorities[stream];
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) {
  *reinterpret_cast<Event*>(event) = {now(), true};
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  const Event &a = *reinterpret_cast<Event*>(first), &b = *reinterpret_cast<Event*>(second);
  *milliseconds = b.milliseconds - a.milliseconds;
  return a.is_recorded && b.is_recorded ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  if (!stream || captures.count(stream)) {
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  captures[stream] = ++last_capture;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  if (!captures.count(stream)) {
    return fail(cudaErrorIllegalState);
  }
  const int number = captures[stream];
  captures.erase(stream);
  if (broken.erase(stream)) {
    *graph = nullptr;
    return fail(cudaErrorStreamCaptureInvalidated);
  }
  *graph = reinterpret_cast<cudaGraph_t>(static_cast<intptr_t>(number));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t* dependencies) {
  const int number = feigned_capture(stream);
  cudaStreamIsCapturing(stream, status);
  if (id) *id = number;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(static_cast<intptr_t>(number));
  if (dependencies) *dependencies = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode present = cudaStreamCaptureModeGlobal;
  std::swap(*mode, present);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  if (on_end) {
    on_end(static_cast<int>(reinterpret_cast<intptr_t>(executable)));
  }
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  if (on_launch) {
    on_launch(static_cast<int>(reinterpret_cast<intptr_t>(executable)));
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
  *of = {};
  of->maxThreadsPerBlock = 1024;
  of->maxDynamicSharedSizeBytes = 232448;
  of->binaryVersion = of->ptxVersion = 90;
  return cudaSuccess;
}

// What the driver is asked for by name: the encoding of tensor maps, with its demands on operands. Nothing else is there.
static CUresult encode(CUtensorMap*, CUtensorMapDataType, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  bool fits = reinterpret_cast<uintptr_t>(address) % 16 == 0 && rank >= 1 && rank <= 5;
  for (cuuint32_t i = 0; fits && i < rank; ++i) {
    fits = sizes[i] && sizes[i] <= (1ull << 32) && box[i] && box[i] <= 256;
    fits = fits && (i + 1 == rank || (strides[i] % 16 == 0 && strides[i] < (1ull << 40)));
  }
  return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult nothing() { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool is_there = !std::strcmp(name, "cuTensorMapEncodeTiled");
  *function = is_there ? reinterpret_cast<void*>(encode) : reinterpret_cast<void*>(nothing);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
