// The checked arguments of hopper_gemm_; its contract is in torch-ext/optimizer/kernels/gpu/hopper_gemm.py.
#pragma once

#include "arguments.h"
#include "hopper_squares.h"

#include <algorithm>
#include <limits>

namespace optimizer {

constexpr int64_t kHalfBytes = 2;  // of an element

// A batch of matrices as TMA takes them: rows or columns are runs of memory; strides count elements.
struct Panels {
  char* data = nullptr;
  int64_t matrix_stride = 0, run_stride = 0;
  bool along_k = false;  // runs are along the dimension that is summed over
};

struct HopperGemm {
  int64_t count, m, k;
  ScalarType dtype;
  int32_t device;
  Panels a, b, d, c;  // d without data where D is not given
  float alpha, beta, diagonal;
  int64_t sections;
};

void hopper_gemm_cuda(const HopperGemm& call);

// Calls run(piece) for pieces of at most `together` of a call's matrices.
template <class Run>
void in_pieces(const HopperGemm& call, int64_t together, const Run& run) {
  for (int64_t first = 0; first < call.count; first += together) {
    HopperGemm piece = call;
    piece.count = std::min(together, call.count - first);
    for (Panels* panels : {&piece.a, &piece.b, &piece.d, &piece.c}) {
      panels->data += panels->data ? first * panels->matrix_stride * kHalfBytes : 0;
    }
    run(piece);
  }
}

constexpr int64_t kTmaBytes = 16;  // of which addresses and strides are multiples
constexpr int64_t kSideStep = 8;   // of which m is: then rows of a contiguous result begin where TMA can store

inline void check_hopper_batch(const char* name, const Tensor& t, const Tensor& like, int64_t rows, int64_t cols) {
  STD_TORCH_CHECK(t.device() == like.device(), name, " must be on ", place(like), " like A, got ", place(t));
  STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), name, " must be ", like.scalar_type(), " like A, got ",
                  t.scalar_type());
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == like.size(0) && t.size(1) == rows && t.size(2) == cols, name,
                  " must be (", like.size(0), ", ", rows, ", ", cols, "), got ", shape(t));
}

// Of a dimension of one element no stride is used, and any that TMA takes will do.
inline int64_t stride_for_tma(const Tensor& t, int64_t dim) {
  return t.size(dim) > 1 ? t.stride(dim) : kTmaBytes;
}

inline Panels check_panels(const char* name, const Tensor& t, int64_t k, bool written) {
  const bool by_rows = t.stride(2) == 1 || t.stride(1) != 1;
  const int64_t run = by_rows ? 2 : 1, matrices = stride_for_tma(t, 0), runs = stride_for_tma(t, 3 - run);
  const int64_t step = kTmaBytes / t.element_size();
  char* const data = data_of(t, written);
  const bool fits = (t.stride(run) == 1 || t.size(run) == 1) && matrices > 0 && runs > 0 && matrices % step == 0 &&
                    runs % step == 0 && reinterpret_cast<uintptr_t>(data) % kTmaBytes == 0;
  STD_TORCH_CHECK(fits, name, " must have a stride of 1 along rows or columns, and its other strides and its address "
                  "must be multiples of ", kTmaBytes, " bytes; got strides ", tuple(t.strides()), " at address ",
                  reinterpret_cast<uintptr_t>(data) % kTmaBytes, " modulo ", kTmaBytes);
  return {data, matrices, runs, run == k};
}

inline void check_hopper_sizes(const Tensor& a, int64_t sections) {
  constexpr int64_t kLargestInt = std::numeric_limits<int32_t>::max();
  STD_TORCH_CHECK(sections >= 1 && sections <= hopper::kMostSections, "sections must be 1 to ", hopper::kMostSections,
                  ", got ", sections);
  STD_TORCH_CHECK(is_half(a.scalar_type()),
                  "A must be float16 or bfloat16, got ", a.scalar_type());
  STD_TORCH_CHECK(a.dim() == 3 && a.size(2) > 0 && a.size(2) <= kLargestInt,
                  "A must be (batch, m, k) with 0 < k < 2^31, got ", shape(a));
  const int64_t side = ceil_div(a.size(1), hopper::kSquare);
  const int64_t more = sections > 1 ? hopper::kAtOnce * sections : 0;
  const bool is_counted =
      side == 0 || (side <= hopper::kMostSide && a.size(0) <= kLargestInt / (hopper::triangle(side) + more));
  STD_TORCH_CHECK(a.size(1) % kSideStep == 0 && is_counted, "m must be a multiple of ", kSideStep,
                  ", and all results together have fewer than 2^31 squares of ", hopper::kSquare,
                  " and sections of them, got A ", shape(a));
}

inline HopperGemm check_hopper_gemm(const Tensor& c, const Tensor& a, const Tensor& b, const MaybeTensor& d,
                                    double alpha, double beta, double diagonal, int64_t sections) {
  check_hopper_sizes(a, sections);
  const int64_t m = a.size(1), k = a.size(2);
  check_hopper_batch("B", b, a, k, m);
  check_hopper_batch("C", c, a, m, m);
  HopperGemm call{a.size(0), m, k, a.scalar_type(), a.get_device_index()};
  call.alpha = static_cast<float>(alpha);
  call.beta = static_cast<float>(beta);
  call.diagonal = static_cast<float>(diagonal);
  call.sections = sections;
  if (d) {
    check_hopper_batch("D", *d, a, m, m);
  }
  if (call.count == 0 || m == 0) {
    return call;
  }
  Spans spans(4);
  spans.write("C", c);
  spans.read("A", a);
  spans.read("B", b);
  spans.read("D", d);
  spans.check();
  call.a = check_panels("A", a, 2, false);
  call.b = check_panels("B", b, 1, false);
  call.c = check_panels("C", c, 2, true);
  if (d) {
    call.d = check_panels("D", *d, 2, false);
  }
  STD_TORCH_CHECK(call.a.along_k || !call.b.along_k,
                  "A with runs along m needs B with runs along m, as Aᵀ has; got strides ", tuple(a.strides()), " and ",
                  tuple(b.strides()));
  return call;
}

}  // namespace optimizer
