// What the parts of the feigned runtime share: the present device, the last error, and whether anything is captured.
//
// Device memory is the host's, copies and fills are done at once, and kernels do nothing. What no part defines returns
// success and does nothing (libraries.py).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace feigned {

constexpr size_t kMemory = size_t{80} << 30, kAlignment = 512;

inline thread_local int device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;

inline cudaError_t fail(cudaError_t error) { return last_error = error; }

bool anything_is_captured();
void break_captures();
size_t used_on(int device);

// The result of a call that waits for the device, which captures forbid: it breaks them.
inline cudaError_t waited(bool is_captured) {
  if (!is_captured) {
    return cudaSuccess;
  }
  break_captures();
  return fail(cudaErrorStreamCaptureUnsupported);
}

}  // namespace feigned
