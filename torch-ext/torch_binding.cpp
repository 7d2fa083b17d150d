#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "momentum_pack_(Tensor(a!)[] momentum, Tensor[] gradient, Tensor(b!) packed, float beta, bool nesterov, "
      "bool maximize=False, *, int[]? offsets=None, Tensor? active=None, Tensor? grad_scale=None, "
      "Tensor? found_inf=None) -> ()");
  ops.def(
      "descend_(Tensor(a!)[] parameter, Tensor update, Tensor lr, Tensor weight_decay, Tensor multiplier, "
      "int decay_mode=0, *, int[]? offsets=None, Tensor? row_scale=None, Tensor? seeds=None, int[]? origins=None, "
      "Tensor? active=None, Tensor? found_inf=None) -> ()");
  ops.def(
      "gemm_(Tensor(a!) C, Tensor A, Tensor B, Tensor? D, float alpha, float beta, bool symmetric, str instructions) "
      "-> ()");
  ops.def("gemm_instructions() -> str");
}

// A CUDA build of torch loads only the CUDA variant, and parameters may be on the CPU there too.
#if defined(CPU_KERNEL) || defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("momentum_pack_", TORCH_BOX(&optimizer::momentum_pack_cpu));
  ops.impl("descend_", TORCH_BOX(&optimizer::descend_cpu));
  ops.impl("gemm_", TORCH_BOX(&optimizer::gemm_cpu));
}

// An operation without tensors has no device.
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("gemm_instructions", TORCH_BOX(&optimizer::gemm_instructions));
}
#endif

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("momentum_pack_", TORCH_BOX(&optimizer::momentum_pack_cuda));
  ops.impl("descend_", TORCH_BOX(&optimizer::descend_cuda));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
