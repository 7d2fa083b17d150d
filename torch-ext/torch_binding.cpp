// The schemas of the operations, and the functions behind them on each device.
#include "../optimizer_common/descend.h"
#include "../optimizer_common/hopper_gemm.h"
#include "../optimizer_common/momentum_pack.h"
#include "../optimizer_common/move_blocks.h"
#include "../optimizer_common/normalize.h"
#include "../optimizer_cpu/gemm.h"
#include "../optimizer_cpu/newton_schulz.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

using namespace optimizer;

namespace {

// An operation on one device: `check` turns the dispatcher's arguments into a call, `run` carries it out.
template <auto check, auto run>
struct Op;

template <class Call, class... Arguments, Call (*check)(Arguments...), auto run>
struct Op<check, run> {
  static void call(Arguments... arguments) { run(check(arguments...)); }
};

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "momentum_pack_(Tensor(a!)[] momentum, Tensor[] gradient, Tensor(b!) packed, float beta, bool nesterov, "
      "bool maximize=False, *, int[]? offsets=None, Tensor? active=None, Tensor? grad_scale=None, "
      "Tensor? found_inf=None, Tensor(c!)[]? momentum_scale=None, Tensor(d!)? norms=None) -> ()");
  ops.def(
      "descend_(Tensor(a!)[] parameter, Tensor update, Tensor lr, Tensor weight_decay, Tensor multiplier, "
      "int decay_mode=0, *, int[]? offsets=None, Tensor? row_scale=None, Tensor? seeds=None, int[]? origins=None, "
      "Tensor? active=None, Tensor? found_inf=None, Tensor(b!)[]? remainder=None, Tensor(c!)? norms=None) -> ()");
  ops.def("move_blocks_(Tensor(a!) matrices, Tensor(b!) buffer, Tensor blocks, bool to_buffer) -> ()");
  ops.def("frobenius_norm_(Tensor(a!) norms, Tensor X) -> ()");
  ops.def("normalize_(Tensor(a!) out, Tensor X, Tensor norms, float eps, float scale) -> ()");
  ops.def(
      "gemm_(Tensor(a!) C, Tensor A, Tensor B, Tensor? D, float alpha, float beta, bool symmetric, str instructions) "
      "-> ()");
  ops.def("gemm_instructions(str dtype) -> str");
  ops.def(
      "newton_schulz_(Tensor(a!) X, Tensor(b!) A, Tensor(c!) B, float[] coefficients, bool alone, str instructions) "
      "-> ()");
  ops.def(
      "gram_newton_schulz_(Tensor(a!) X, Tensor(b!) R, Tensor(c!) H, Tensor(d!) Q, Tensor(e!) T, float[] coefficients, "
      "int[] windows, bool alone, str instructions, str square_instructions) -> ()");
  ops.def(
      "hopper_gemm_(Tensor(a!) C, Tensor A, Tensor B, Tensor? D, float alpha, float beta, float diagonal, "
      "int sections=1) -> ()");
}

// A CUDA build of torch loads only the CUDA variant, and parameters may be on the CPU there too.
#if defined(CPU_KERNEL) || defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("momentum_pack_", TORCH_BOX((&Op<check_momentum_pack, momentum_pack_cpu>::call)));
  ops.impl("descend_", TORCH_BOX((&Op<check_descend, descend_cpu>::call)));
  ops.impl("move_blocks_", TORCH_BOX((&Op<check_move_blocks, move_blocks_cpu>::call)));
  ops.impl("frobenius_norm_", TORCH_BOX((&Op<check_frobenius_norm, frobenius_norm_cpu>::call)));
  ops.impl("normalize_", TORCH_BOX((&Op<check_normalize, normalize_cpu>::call)));
  ops.impl("gemm_", TORCH_BOX((&Op<check_gemm, gemm_cpu>::call)));
  ops.impl("newton_schulz_", TORCH_BOX((&Op<check_newton_schulz, newton_schulz_cpu>::call)));
  ops.impl("gram_newton_schulz_", TORCH_BOX((&Op<check_gram_newton_schulz, gram_newton_schulz_cpu>::call)));
}

// An operation without tensors has no device.
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("gemm_instructions", TORCH_BOX(&gemm_instructions));
}
#endif

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("momentum_pack_", TORCH_BOX((&Op<check_momentum_pack, momentum_pack_cuda>::call)));
  ops.impl("descend_", TORCH_BOX((&Op<check_descend, descend_cuda>::call)));
  ops.impl("move_blocks_", TORCH_BOX((&Op<check_move_blocks, move_blocks_cuda>::call)));
  ops.impl("frobenius_norm_", TORCH_BOX((&Op<check_frobenius_norm, frobenius_norm_cuda>::call)));
  ops.impl("normalize_", TORCH_BOX((&Op<check_normalize, normalize_cuda>::call)));
  ops.impl("hopper_gemm_", TORCH_BOX((&Op<check_hopper_gemm, hopper_gemm_cuda>::call)));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
