// A CUDA driver that launches nothing: what Triton's launcher asks of one, answered as an H100 would, at once.
#include <cuda.h>
#include <string.h>

#define DONE CUDA_SUCCESS

static long launched;
static const long* kept_sizes;
static char* kept;

long launches_so_far(void) { return launched; }

// After this call each launch copies to `to` its grid, block, shared memory, function, stream and number of attributes,
// then its parameters, whose sizes in bytes `sizes` lists up to a 0. If `to` is null, nothing is copied.
void keep_launches(char* to, const long* sizes) {
  kept = to;
  kept_sizes = sizes;
}

static void keep(const CUlaunchConfig* config, CUfunction function, void** parameters) {
  const long facts[] = {
      config->gridDimX,  config->gridDimY,       config->gridDimZ, config->blockDimX,     config->blockDimY,
      config->blockDimZ, config->sharedMemBytes, (long)function,   (long)config->hStream, config->numAttrs,
  };
  char* to = memcpy(kept, facts, sizeof(facts)) + sizeof(facts);
  for (const long* size = kept_sizes; *size; to += *size++) {
    memcpy(to, *parameters++, *size);
  }
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  ++launched;
  if (kept) {
    keep(config, function, parameters);
  }
  return DONE;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  cuuint64_t facts[16] = {(cuuint64_t)address, type, swizzle, fill, rank};  // all in which ours differ
  for (cuuint32_t i = 0; i < rank && i < 3; ++i) {
    facts[5 + i] = sizes[i];
    facts[8 + i] = i + 1 < rank ? strides[i] : 0;
    facts[11 + i] = box[i];
  }
  memcpy(map, facts, sizeof(facts));
  return DONE;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr*)value = pointer;
  return DONE;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 1024;
  }
  return DONE;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return DONE;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = (CUmodule)1;
  return DONE;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  *function = (CUfunction)1;
  return DONE;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = (CUcontext)1;
  return DONE;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return cuCtxGetCurrent(context); }

// Torch asks no stream whether it is captured unless its device has a context.
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return DONE;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = "a driver that does nothing has no errors";
  return DONE;
}

CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return DONE;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return DONE;
}

CUresult cuCtxGetDevice(CUdevice* device) { return cuDeviceGet(device, 0); }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return DONE;
}

CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  *value = 0;
  return DONE;
}

CUresult cuModuleUnload(CUmodule module) { return DONE; }
CUresult cuInit(unsigned flags) { return DONE; }
CUresult cuCtxSetCurrent(CUcontext context) { return DONE; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return DONE; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return DONE; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache cache) { return DONE; }
