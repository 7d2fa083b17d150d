// gemm_, products of bfloat16 matrices on the CPU: picks an instruction set and starts the work.
//
// The rest is in headers. In reading order:
//
//     gemm.h           the arguments of the op, checked: a call
//     gemm_blocks.h    blocks of a result, the order in which operands are packed, what an instruction set provides
//     gemm_product.h   one thread's part of a product: pack, sum over k, write results
//     gemm_tasks.h     a batch of products, cut into tasks
//     threads.h        who does which task
//     gemm_portable.h, gemm_avx512.h, gemm_amx.h   the instruction sets
#include "gemm.h"

#include "gemm_amx.h"
#include "gemm_avx512.h"
#include "gemm_portable.h"
#include "gemm_tasks.h"

#include <string>

namespace optimizer {
namespace {

// The best first.
const Instructions* const kSets[] = {
#if defined(__x86_64__)
    &amx::kInstructions,
    &avx512::kInstructions,
#endif
    &portable::kInstructions,
};

std::string names_here() {
  std::string names;
  for (const Instructions* set : kSets) {
    if (set->available()) {
      names += (names.empty() ? "" : ", ") + std::string(set->name);
    }
  }
  return names;
}

const Instructions& select(const std::string& name) {
  for (const Instructions* set : kSets) {
    if (name == set->name && set->available()) {
      return *set;
    }
  }
  STD_TORCH_CHECK(false, "instructions must be one of those that this processor and system have, ", names_here(),
                  "; got ", name);
}

}  // namespace

std::string gemm_instructions() {
  return names_here().substr(0, names_here().find(','));
}

void gemm_cpu(const Gemm& call) {
  const Instructions& by = select(call.instructions);
  if (call.count > 0 && call.m > 0 && call.n > 0) {
    multiply(call, by);
  }
}

}  // namespace optimizer
