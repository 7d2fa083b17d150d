// Arguments with one value for the list or one per matrix, on the host or on the device.
#pragma once

#include "arguments.h"

namespace optimizer {

constexpr bool kHost = true, kDevice = false;

// Where the values of an argument are, and how to read them there.
template <class V>
struct Values {
  const V* data = nullptr;  // null where the argument was not given
  int64_t step = 0;
  bool on_host = true;

  OPTIMIZER_INLINE V operator[](int64_t i) const { return data[i * step]; }
  OPTIMIZER_INLINE V get(int64_t i, V otherwise) const { return data ? data[i * step] : otherwise; }
  Values where(bool host) const { return host == on_host ? *this : Values{}; }
};

template <class V>
Values<V> values(const char* name, const MaybeTensor& t, ScalarType dtype, int64_t count, const Tensor& buffer) {
  if (!t) {
    return {};
  }
  STD_TORCH_CHECK(t->scalar_type() == dtype, name, " must be ", dtype, ", got ", t->scalar_type());
  STD_TORCH_CHECK(t->numel() == count && t->is_contiguous(), name, " must have ", count,
                  " elements, contiguous, got shape ", shape(*t));
  STD_TORCH_CHECK(t->is_cpu() || t->device() == buffer.device(), name, " must be on the CPU or on ", place(buffer),
                  ", got ", place(*t));
  return {static_cast<const V*>(t->const_data_ptr()), count == 1 ? 0 : 1, t->is_cpu()};
}

// A float32 or float64 number for the list, or one per matrix.
struct Numbers {
  Values<float> single;
  Values<double> wide;

  OPTIMIZER_INLINE double get(int64_t i, double otherwise) const {
    return single.data ? static_cast<double>(single[i]) : wide.get(i, otherwise);
  }
  OPTIMIZER_INLINE double operator[](int64_t i) const { return get(i, 0); }
  Numbers where(bool host) const { return {single.where(host), wide.where(host)}; }
};

inline Numbers numbers(const char* name, const Tensor& t, int64_t count, const Tensor& buffer) {
  STD_TORCH_CHECK(t.numel() == 1 || t.numel() == count, name, " must have 1 or ", count, " elements, got shape ",
                  shape(t));
  const int64_t length = t.numel() == 1 ? 1 : count;
  if (t.scalar_type() == ScalarType::Double) {
    return {{}, values<double>(name, t, ScalarType::Double, length, buffer)};
  }
  return {values<float>(name, t, ScalarType::Float, length, buffer), {}};
}

// Which matrices take part at all.
struct Gate {
  Values<bool> active;
  Values<float> found_inf;

  OPTIMIZER_INLINE bool is_open(int64_t i) const { return active.get(i, true) && found_inf.get(i, 0) == 0; }
  Gate where(bool host) const { return {active.where(host), found_inf.where(host)}; }
};

inline Gate gate(const MaybeTensor& active, const MaybeTensor& found_inf, int64_t count, const Tensor& buffer) {
  return {values<bool>("active", active, ScalarType::Bool, count, buffer),
          values<float>("found_inf", found_inf, ScalarType::Float, 1, buffer)};
}

}  // namespace optimizer
