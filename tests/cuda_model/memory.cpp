// What a kernel may touch, and the reports of the compiler's sanitizers about what it does touch.
#include "model.h"

#include <link.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace cuda_model {
namespace {

struct Range {
  uintptr_t begin, end;
  bool written = false, read_by_host = false;

  bool holds(uintptr_t address, size_t bytes) const { return address >= begin && address + bytes <= end; }
};

std::vector<Range> ranges;  // sorted and apart from each other
size_t found_last = 0;      // most accesses go to the range of one before

struct Library {
  Range code{}, shared{};  // the whole of it, and what is local to the calling thread

  Library() { dl_iterate_phdr(&look, this); }

 private:
  static int look(dl_phdr_info* info, size_t, void* into) {
    auto& library = *static_cast<Library*>(into);
    Range code{UINTPTR_MAX, 0};
    size_t shared_bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& part = info->dlpi_phdr[i];
      if (part.p_type == PT_LOAD) {
        code.begin = std::min<uintptr_t>(code.begin, info->dlpi_addr + part.p_vaddr);
        code.end = std::max<uintptr_t>(code.end, info->dlpi_addr + part.p_vaddr + part.p_memsz);
      } else if (part.p_type == PT_TLS) {
        shared_bytes = part.p_memsz;
      }
    }
    if (!code.holds(reinterpret_cast<uintptr_t>(&look), 1)) {
      return 0;
    }
    const auto shared = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
    library.code = code;
    library.shared = {shared, shared ? shared + shared_bytes : 0};
    return 1;
  }
};

Library library;

// Memory that is local to a thread is there only after its first use.
thread_local volatile char touched = 0;

std::string bytes_text(size_t bytes, bool writes) {
  return std::string(writes ? "writes " : "reads ") + std::to_string(bytes) + " bytes ";
}

std::vector<Range>::iterator first_behind(uintptr_t address) {
  return std::upper_bound(ranges.begin(), ranges.end(), address,
                          [](uintptr_t a, const Range& range) { return a < range.begin; });
}

bool is_in_last(uintptr_t address, size_t bytes) {
  return found_last < ranges.size() && ranges[found_last].holds(address, bytes);
}

// Whether a tensor has these bytes, which `found_last` then tells.
bool is_in_tensor(uintptr_t address, size_t bytes) {
  if (!is_in_last(address, bytes)) {
    found_last = std::max<ptrdiff_t>(first_behind(address) - ranges.begin() - 1, 0);
  }
  return is_in_last(address, bytes);
}

void check_argument(uintptr_t address, size_t bytes, bool writes) {
  if (!is_in_tensor(address, bytes)) {
    fail(bytes_text(bytes, writes) + "outside of the tensors of the call");
  }
  if (ranges[found_last].read_by_host) {
    fail(bytes_text(bytes, writes) + "of a tensor that the host has read");
  }
  if (writes && !ranges[found_last].written) {
    fail(bytes_text(bytes, writes) + "of a tensor that is only read");
  }
}

// What the host reads is on the CPU: a kernel on a GPU could not read it.
void note_host(uintptr_t address, size_t bytes) {
  if (is_in_tensor(address, bytes)) {
    ranges[found_last].read_by_host = true;
  }
}

void check_access(uintptr_t address, size_t bytes, bool writes) {
  if (!in_kernel()) {
    note_host(address, bytes);
    return;
  }
  if (is_on_stack(address) || library.shared.holds(address, bytes)) {
    return;
  }
  if (writes || !(is_parameter(address) || library.code.holds(address, bytes))) {
    check_argument(address, bytes, writes);
  }
}

// As the compiler lays out what it tells its sanitizers' handlers.
struct SourceLocation {
  const char* file;
  uint32_t line, column;

  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};

struct Type {
  uint16_t kind, info;
  char name[1];
};

struct Mismatch {
  SourceLocation where;
  const Type* type;
  uint8_t log_alignment, kind;
};

struct Bounds {
  SourceLocation where;
  const Type *array, *index;
};

}  // namespace

void allow(const void* begin, size_t bytes, bool written) {
  if (bytes == 0) {
    return;
  }
  const auto first = reinterpret_cast<uintptr_t>(begin);
  Range added{first, first + bytes, written};
  // What overlaps it otherwise was memory of tensors that are gone.
  std::erase_if(ranges, [&](const Range& range) {
    const bool is_same = range.begin == added.begin && range.end == added.end;
    added.written |= is_same && range.written;
    added.read_by_host |= is_same && range.read_by_host;
    return range.begin < added.end && added.begin < range.end;
  });
  ranges.insert(first_behind(first), added);
}

void forget() {
  ranges.clear();
}

void find_shared() {
  touched = 1;
  library = Library();
}

void poison_shared() {
  std::memset(reinterpret_cast<void*>(library.shared.begin), 0xff, library.shared.end - library.shared.begin);
}

}  // namespace cuda_model

using namespace cuda_model;

extern "C" {

#define CUDA_MODEL_ACCESS(size)                                                                       \
  void __asan_load##size##_noabort(uintptr_t address) { check_access(address, size, false); }         \
  void __asan_store##size##_noabort(uintptr_t address) { check_access(address, size, true); }
CUDA_MODEL_ACCESS(1)
CUDA_MODEL_ACCESS(2)
CUDA_MODEL_ACCESS(4)
CUDA_MODEL_ACCESS(8)
CUDA_MODEL_ACCESS(16)
#undef CUDA_MODEL_ACCESS

void __asan_loadN_noabort(uintptr_t address, size_t bytes) { check_access(address, bytes, false); }
void __asan_storeN_noabort(uintptr_t address, size_t bytes) { check_access(address, bytes, true); }
// What else its code calls, for nothing that is watched here.
void __asan_handle_no_return() {}
void __asan_before_dynamic_init(const char*) {}
void __asan_after_dynamic_init() {}

void __ubsan_handle_type_mismatch_v1(const Mismatch* fault, uintptr_t address) {
  if (in_kernel()) {
    const size_t alignment = size_t{1} << fault->log_alignment;
    fail("makes a misaligned access at " + fault->where.text() + ": to " + fault->type->name + " at " +
         std::to_string(address % alignment) + " bytes behind a multiple of " + std::to_string(alignment));
  }
}

void __ubsan_handle_out_of_bounds(const Bounds* fault, uintptr_t index) {
  if (in_kernel()) {
    fail("has index " + std::to_string(static_cast<intptr_t>(index)) + " outside of " + fault->array->name + " at " +
         fault->where.text());
  }
}

}  // extern "C"
