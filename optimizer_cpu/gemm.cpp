#include "../optimizer_common/gemm.h"

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

std::string take(String handle) {
  const char* data = nullptr;
  size_t length = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  const std::string text(data, length);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

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

void gemm_cpu(const Tensor& c, const Tensor& a, const Tensor& b, const MaybeTensor& d, double alpha, double beta,
              bool symmetric, String instructions) {
  const Instructions& by = select(take(instructions));
  const Gemm call = check_gemm(c, a, b, d, alpha, beta, symmetric);
  if (call.count > 0 && call.m > 0 && call.n > 0) {
    multiply(call, by);
  }
}

}  // namespace optimizer
