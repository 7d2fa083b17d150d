// gemm_, newton_schulz_ and gram_newton_schulz_, products of float32 or bfloat16 matrices on the CPU: picks instruction
// sets and starts the work.
//
// The rest is in headers. In reading order:
//
//     gemm.h           the arguments of the op, checked: a call
//     gemm_blocks.h    blocks of a result, the order in which operands are packed, what an instruction set provides
//     gemm_product.h   one thread's part of a product: pack, sum over k, write results
//     gemm_tasks.h     a batch of products, cut into tasks
//     threads.h        who does which task
//     gemm_float32.h   the instruction sets for float32
//     gemm_portable.h, gemm_avx512.h, gemm_amx.h   those for bfloat16
//     newton_schulz.h  the arguments of the iterations, checked
//     newton_schulz_links.h   their products, and what happens between them
//     newton_schulz_turns.h   who does which
#include "gemm.h"

#include "gemm_amx.h"
#include "gemm_avx512.h"
#include "gemm_float32.h"
#include "gemm_portable.h"
#include "gemm_tasks.h"
#include "newton_schulz_turns.h"

#include <string>
#include <type_traits>
#include <vector>

namespace optimizer {
namespace {

// The best first.
template <class Element>
constexpr const Instructions<Element>* kSets[] = {
#if defined(__x86_64__)
    &amx::kInstructions,
    &avx512::kInstructions,
#endif
    &portable::kInstructions,
};

template <>
constexpr const Instructions<float>* kSets<float>[] = {
#if defined(__x86_64__)
    &float32::kAvx512,
    &float32::kAvx2,
#endif
    &float32::kPortable,
};

template <class Element>
std::vector<std::string> names_here() {
  std::vector<std::string> names;
  for (const Instructions<Element>* set : kSets<Element>) {
    if (set->available()) {
      names.push_back(set->name);
    }
  }
  return names;
}

template <class Element>
const Instructions<Element>& select(const std::string& name) {
  for (const Instructions<Element>* set : kSets<Element>) {
    if (name == set->name && set->available()) {
      return *set;
    }
  }
  std::string names;
  for (const std::string& here : names_here<Element>()) {
    names += (names.empty() ? "" : ", ") + here;
  }
  STD_TORCH_CHECK(false, "instructions must be one of those that this processor and system have, ", names, "; got ",
                  name);
}

}  // namespace

std::string gemm_instructions(String dtype) {
  const std::string name = take(dtype);
  STD_TORCH_CHECK(name == "float32" || name == "bfloat16", "dtype must be float32 or bfloat16, got ", name);
  return name == "float32" ? names_here<float>().front() : names_here<BFloat16>().front();
}

void gemm_cpu(const AnyGemm& any) {
  std::visit(
      [](const auto& call) {
        const auto& by = select<std::remove_const_t<std::remove_pointer_t<decltype(call.a.data)>>>(call.instructions);
        if (call.count > 0 && call.m > 0 && call.n > 0) {
          multiply(call, by);
        }
      },
      any);
}

void newton_schulz_cpu(const AnyNewtonSchulz& any) {
  std::visit(
      [](const auto& call) {
        const auto& by = select<std::remove_pointer_t<decltype(call.x)>>(call.instructions);
        if (call.count > 0 && call.m > 0 && call.n > 0) {
          iterate(call, by, [&](const MatrixSlice& slice) { return links_of(call, slice, by); });
        }
      },
      any);
}

void gram_newton_schulz_cpu(const AnyGramNewtonSchulz& any) {
  std::visit(
      [](const auto& call) {
        const auto& by = select<std::remove_pointer_t<decltype(call.x)>>(call.instructions);
        const auto& by_squares = select<float>(call.square_instructions);
        if (call.count > 0 && call.m > 0 && call.n > 0) {
          iterate(call, by, [&](const MatrixSlice& slice) { return links_of(call, slice, by, by_squares); });
        }
      },
      any);
}

}  // namespace optimizer
