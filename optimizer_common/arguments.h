// What the ops ask of their arguments. Every check is made before anything is written.
#pragma once

#include "matrices.h"

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace optimizer {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;
using MaybeTensors = std::optional<Tensors>;
using MaybeInts = std::optional<std::vector<int64_t>>;

inline std::string tuple(torch::headeronly::IntHeaderOnlyArrayRef numbers) {
  std::string text;
  for (const int64_t number : numbers) {
    text += (text.empty() ? "" : ", ") + std::to_string(number);
  }
  return "(" + text + ")";
}

inline std::string shape(const Tensor& t) {
  return tuple(t.sizes());
}

inline std::string place(const Tensor& t) {
  return t.is_cpu() ? "the CPU" : "device " + std::to_string(t.get_device_index());
}

// The dtype of a list; an empty one is taken to be float32.
inline ScalarType dtype_of(const Tensors& list) {
  return list.empty() ? ScalarType::Float : list[0].scalar_type();
}

// How elements lie from the first to the last in memory.
struct Extent {
  int64_t elements = 0;  // that fit there; 0 for an empty tensor
  bool distinct = true;  // different elements certainly have different addresses
  bool gapless = true;   // every place certainly holds an element
};

inline Extent extent(const Tensor& t) {
  if (t.is_contiguous()) {
    return {t.numel()};
  }
  const auto sizes = t.sizes(), strides = t.strides();
  std::vector<std::pair<int64_t, int64_t>> steps;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1) {
      steps.emplace_back(strides[d], sizes[d]);
    }
  }
  std::sort(steps.begin(), steps.end());
  Extent result{1};
  for (const auto& [stride, size] : steps) {
    result.distinct &= stride >= result.elements;
    result.gapless &= stride <= result.elements;
    result.elements += stride * (size - 1);
  }
  return result;
}

// Whether both have the same elements at the same places.
inline bool is_same(const Tensor& a, const Tensor& b) {
  const auto same = [](const auto& x, const auto& y) { return std::equal(x.begin(), x.end(), y.begin(), y.end()); };
  return a.const_data_ptr() == b.const_data_ptr() && a.scalar_type() == b.scalar_type() && same(a.sizes(), b.sizes()) &&
         same(a.strides(), b.strides());
}

// The memory of an argument.
struct Span {
  const char *begin = nullptr, *end = nullptr;
  bool gapless = false, written = false;
  const char* name = "";
  int64_t index = -1;  // in its list

  std::string text() const { return index < 0 ? name : name + ("[" + std::to_string(index) + "]"); }
};

// The memory of all arguments of a call: what is written must not share any with another argument.
class Spans {
 public:
  explicit Spans(size_t most) { spans_.reserve(most); }

  void read(const char* name, const MaybeTensor& t, int64_t index = -1) {
    if (t) {
      add(*t, extent(*t), {.name = name, .index = index});
    }
  }

  void write(const char* name, const Tensor& t, int64_t index = -1) {
    const Extent reach = extent(t);
    STD_TORCH_CHECK(reach.distinct, name, " is written, so its elements must not overlap; got shape ", shape(t),
                    " with strides ", tuple(t.strides()));
    add(t, reach, {.written = true, .name = name, .index = index});
  }

  // Refuses spans that certainly share an element: one starts where the other does, or inside it and it has no gaps.
  // Others may just interleave, as columns of one matrix do.
  void check() {
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.written > b.written;
    });
    const Span none;
    const Span *previous = &none, *reaching = &none, *writing = &none;  // the last two: gapless, and end last
    for (const Span& s : spans_) {
      refuse(previous->written && s.begin == previous->begin, *previous, s);
      refuse(s.begin < writing->end, *writing, s);
      refuse(s.written && s.begin < reaching->end, *reaching, s);
      reaching = s.gapless && s.end > reaching->end ? &s : reaching;
      writing = s.gapless && s.written ? &s : writing;  // it begins where the one before has ended
      previous = &s;
    }
  }

 private:
  void add(const Tensor& t, const Extent& reach, Span span) {
    if (reach.elements > 0) {
      span.begin = static_cast<const char*>(t.const_data_ptr());
      span.end = span.begin + reach.elements * t.element_size();
      span.gapless = reach.gapless;
      spans_.push_back(span);
    }
  }

  static void refuse(bool shared, const Span& a, const Span& b) {
    STD_TORCH_CHECK(!shared, a.text(), " and ", b.text(), " must not share memory: ", (a.written ? a : b).text(),
                    " is written");
  }

  std::vector<Span> spans_;
};

inline void check_device(const char* name, const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(t.device() == like.device(), name, " must be on ", place(like), " like the other tensors, got ",
                  place(t));
}

inline void check_like(const char* name, const Tensor& t, const Tensor& like) {
  check_device(name, t, like);
  STD_TORCH_CHECK(is_floating(t.scalar_type()), name, " must be float32, float64, float16 or bfloat16, got ",
                  t.scalar_type());
}

inline void check_matrix(const char* name, const Tensor& t, int64_t i) {
  STD_TORCH_CHECK(t.dim() == 2, name, "[", i, "] must be a matrix, got shape ", shape(t));
}

// A list of matrices of one dtype on the device of the buffer.
inline void check_matrices(const char* name, const Tensors& list, const Tensor& buffer) {
  for (size_t i = 0; i < list.size(); ++i) {
    check_matrix(name, list[i], i);
    check_like(name, list[i], buffer);
    STD_TORCH_CHECK(list[i].scalar_type() == list[0].scalar_type(), name, " must have one dtype, got ",
                    list[0].scalar_type(), " and ", list[i].scalar_type(), " at ", i);
  }
}

inline void check_offsets(const char* name, const Tensor& buffer, const Tensors& list,
                          const std::vector<int64_t>& offsets) {
  STD_TORCH_CHECK(buffer.dim() == 1 && buffer.is_contiguous(), name,
                  " must be contiguous and 1-D where offsets are given, got shape ", shape(buffer));
  STD_TORCH_CHECK(offsets.size() == list.size(), "offsets must be one per matrix, ", list.size(), ", got ",
                  offsets.size());
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (size_t i = 0; i < list.size(); ++i) {
    const int64_t size = list[i].numel();
    STD_TORCH_CHECK(offsets[i] >= 0 && offsets[i] <= buffer.numel() - size, "offsets[", i, "] = ", offsets[i], " puts ",
                    size, " elements outside of ", name, ", which has ", buffer.numel());
    if (size > 0) {
      parts.emplace_back(offsets[i], offsets[i] + size);
    }
  }
  std::sort(parts.begin(), parts.end());
  for (size_t i = 1; i < parts.size(); ++i) {
    STD_TORCH_CHECK(parts[i - 1].second <= parts[i].first, "offsets overlap: elements ", parts[i - 1].first, " to ",
                    parts[i - 1].second, " and a matrix from ", parts[i].first);
  }
}

// The buffer is a batch (B, rows, cols) of any strides, or flat with the offset of each matrix.
inline void check_buffer(const char* name, const Tensor& buffer, const Tensors& list, const MaybeInts& offsets) {
  check_like(name, buffer, buffer);
  if (offsets) {
    return check_offsets(name, buffer, list, *offsets);
  }
  STD_TORCH_CHECK(buffer.dim() == 3 && buffer.size(0) == static_cast<int64_t>(list.size()), name, " must be (",
                  list.size(), ", rows, cols), got ", shape(buffer));
  for (size_t i = 0; i < list.size(); ++i) {
    STD_TORCH_CHECK(list[i].size(0) == buffer.size(1) && list[i].size(1) == buffer.size(2), name, " of shape ",
                    shape(buffer), " needs matrices of its last two sizes, got ", shape(list[i]), " at ", i);
  }
}

// Inputs are only read; their type does not say so because a View serves written tensors, too.
inline char* data_of(const Tensor& t, bool written) {
  return static_cast<char*>(written ? t.mutable_data_ptr() : const_cast<void*>(t.const_data_ptr()));
}

inline View view_of(const Tensor& t, bool written) {
  return make_view(data_of(t, written), t.size(0), t.size(1), t.stride(0), t.stride(1));
}

inline View part_of(const Tensor& buffer, bool written, const MaybeInts& offsets, const Tensor& like, int64_t i) {
  const int64_t rows = like.size(0), cols = like.size(1);
  const int64_t first = offsets ? (*offsets)[i] : i * buffer.stride(0);
  const int64_t row_stride = offsets ? cols : buffer.stride(1), col_stride = offsets ? 1 : buffer.stride(2);
  char* const data = data_of(buffer, written) + first * element_size(buffer.scalar_type());
  return make_view(data, rows, cols, row_stride, col_stride);
}

}  // namespace optimizer
