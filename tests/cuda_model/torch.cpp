// Torch's part: what the compiled operations ask of it about devices, and what a call's tensors are.
//
// The linker puts a function `__wrap_f` in the place of torch's `f`, which stays there as `__real_f`. Tensors are on the
// CPU. With `tensors_on_device` all of them say that they are on a GPU, so that kernels read numbers, seeds and gates,
// which else the host reads.
#include "model.h"

#include <torch/csrc/stable/c/shim.h>

namespace {

constexpr int32_t kNone = -2;  // -1 is the CPU's
bool tensors_on_device = false;
int32_t guarded_device = kNone;

// Kernels may touch the whole storage: what they must not touch within it, tests compare.
void allow_storage(AtenTensorHandle tensor, const void* data, bool written) {
  int64_t bytes = 0, offset = 0;
  aoti_torch_get_storage_size(tensor, &bytes);
  aoti_torch_get_storage_offset(tensor, &offset);
  int32_t dtype = 0;
  aoti_torch_get_dtype(tensor, &dtype);
  const int64_t before = offset * aoti_torch_dtype_element_size(dtype);
  cuda_model::allow(static_cast<const char*>(data) - before, bytes, written);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void cuda_model_configure(uint64_t seed, bool on_device) {
  cuda_model::seed(seed);
  cuda_model::forget();  // what a call left that raised before it held a guard
  tensors_on_device = on_device;
}

AOTITorchError __real_aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type);
AOTITorchError __real_aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index);
AOTITorchError __real_torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError __real_torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);

AOTITorchError __wrap_aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type) {
  const AOTITorchError error = __real_aoti_torch_get_device_type(tensor, type);
  *type = tensors_on_device ? aoti_torch_device_type_cuda() : *type;
  return error;
}

AOTITorchError __wrap_aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index) {
  const AOTITorchError error = __real_aoti_torch_get_device_index(tensor, index);
  *index = tensors_on_device ? 0 : *index;
  return error;
}

AOTITorchError __wrap_torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data) {
  const AOTITorchError error = __real_torch_get_mutable_data_ptr(tensor, data);
  allow_storage(tensor, *data, true);
  return error;
}

AOTITorchError __wrap_torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data) {
  const AOTITorchError error = __real_torch_get_const_data_ptr(tensor, data);
  allow_storage(tensor, *data, false);
  return error;
}

// An operation holds a guard of its device for as long as it launches.
AOTITorchError __wrap_aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  guarded_device = device;
  *guard = reinterpret_cast<DeviceGuardHandle>(&guarded_device);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_delete_device_guard(DeviceGuardHandle) {
  guarded_device = kNone;
  cuda_model::forget();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = cuda_model::current_stream();
  return device == guarded_device ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
}

}  // extern "C"
