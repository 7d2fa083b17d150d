// The model as operations of torch on the CPU, with the checks that hopper_gemm_ makes.
#include "model.h"

#include <torch/csrc/stable/library.h>

namespace {

using optimizer::MaybeTensor;
using optimizer::Tensor;

// As hopper_gemm_, by so many clusters; what is random follows from the seed.
void product(const Tensor& c, const Tensor& a, const Tensor& b, const MaybeTensor& d, double alpha, double beta,
             double diagonal, int64_t clusters, int64_t seed, int64_t omitted) {
  const auto call = optimizer::check_hopper_gemm(c, a, b, d, alpha, beta, diagonal);
  if (call.count > 0 && call.m > 0) {
    hopper_model::run(call, static_cast<int>(clusters), seed, static_cast<hopper_model::Omitted>(omitted));
  }
}

// The squares of `count` results (m, m) in their order: matrix, row and column into each row of `squares`, int32.
void squares(const Tensor& squares, int64_t count, int64_t m) {
  const auto all = optimizer::hopper::squares_of(count, m);
  STD_TORCH_CHECK(squares.size(0) == all.count, "there are ", all.count, " squares");
  int32_t* to = static_cast<int32_t*>(squares.mutable_data_ptr());
  for (int i = 0; i < all.count; ++i, to += 3) {
    const auto square = all.at(i);
    to[0] = square.matrix, to[1] = square.row, to[2] = square.col;
  }
}

}  // namespace

STABLE_TORCH_LIBRARY(hopper_model, operations) {
  operations.def(
      "product(Tensor(a!) C, Tensor A, Tensor B, Tensor? D, float alpha, float beta, float diagonal, int clusters, "
      "int seed, int omitted) -> ()");
  operations.def("squares(Tensor(a!) squares, int count, int m) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hopper_model, CPU, operations) {
  operations.impl("product", TORCH_BOX(&product));
  operations.impl("squares", TORCH_BOX(&squares));
}
