// The package's source, and the parameters of its kernels, whose types no other source knows.
#include "../../optimizer_cuda/hopper_gemm.cu"

#include "host.h"

#include <bit>
#include <stdexcept>

namespace hopper_host {
namespace {

using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;

int64_t address_of(const void* data) { return reinterpret_cast<int64_t>(data); }

// Whether it is the kernel for these operands; if so, tells it by dtype and by whose runs are along k.
template <class Element, class LayoutA, class LayoutB>
bool told(const void* kernel, const void* parameters) {
  using Mainloop = optimizer::hopper::MainloopFor<Element, LayoutA, LayoutB>;
  if (kernel != reinterpret_cast<const void*>(optimizer::hopper::symmetric_kernel<Mainloop>)) {
    return false;
  }
  const auto& call = *static_cast<const optimizer::hopper::Parameters<Mainloop>*>(parameters);
  const auto& loop = call.mainloop;
  const auto& result = call.result;
  tell("kernel", {std::is_same_v<Element, cutlass::half_t>, std::is_same_v<LayoutA, RowMajor>,
                  std::is_same_v<LayoutB, ColumnMajor>, sizeof(optimizer::hopper::Shared<Mainloop>)});
  tell("A", numbers_of(loop.tma_load_a.get_tma_descriptor(), sizeof(Element)));
  tell("B", numbers_of(loop.tma_load_b.get_tma_descriptor(), sizeof(Element)));
  tell("C", numbers_of(&call.target, sizeof(Element)));
  tell("memory", {address_of(call.kept), address_of(call.arrivals)});
  tell("sections", {call.sections.side, call.sections.last, call.sections.sections, call.sections.count});
  tell("sizes", {result.m, call.k, call.matrices, loop.tma_transaction_bytes});
  tell("scalars", {std::bit_cast<int32_t>(result.alpha), std::bit_cast<int32_t>(result.beta),
                   std::bit_cast<int32_t>(result.diagonal)});
  tell("D", {address_of(result.d), result.d_matrix, result.d_row});
  return true;
}

template <class Element>
bool told_for(const void* kernel, const void* parameters) {
  return told<Element, RowMajor, ColumnMajor>(kernel, parameters) ||
         told<Element, RowMajor, RowMajor>(kernel, parameters) ||
         told<Element, ColumnMajor, RowMajor>(kernel, parameters);
}

}  // namespace

void tell_parameters(const void* kernel, const void* parameters) {
  if (!told_for<cutlass::half_t>(kernel, parameters) && !told_for<cutlass::bfloat16_t>(kernel, parameters)) {
    throw std::runtime_error("a kernel is launched that the package does not have");
  }
}

}  // namespace hopper_host
