// The model as operations of torch on the CPU, with the checks that hopper_gemm_ makes.
#include "model.h"

#include <torch/csrc/stable/library.h>

namespace {

using optimizer::MaybeTensor;
using optimizer::Tensor;

// As hopper_gemm_, by so many clusters, some of them at one time, in launches of `piece` matrices; what is
// random follows from the seed.
void product(const Tensor& c, const Tensor& a, const Tensor& b, const MaybeTensor& d, double alpha, double beta,
             double diagonal, int64_t sections, int64_t clusters, int64_t together, int64_t seed, int64_t omitted,
             int64_t piece) {
  const auto call = optimizer::check_hopper_gemm(c, a, b, d, alpha, beta, diagonal, sections);
  const hopper_model::Way way{static_cast<int>(clusters), static_cast<int>(together), static_cast<uint64_t>(seed),
                              static_cast<hopper_model::Omitted>(omitted)};
  if (call.m > 0) {
    optimizer::in_pieces(call, piece, [&](const optimizer::HopperGemm& some) { hopper_model::run(some, way); });
  }
}

// The sections of `count` results (m, m) in their order. A row of `sections`, int32, has matrix, row, column, which section
// of how many, the square's number among those that are cut, the first tile along k and how many.
void sections(const Tensor& sections, int64_t count, int64_t m, int64_t k, int64_t into) {
  const auto all = optimizer::hopper::sections_of_call(count, m, k, into);
  STD_TORCH_CHECK(sections.size(0) >= all.count, "there are ", all.count, " sections");
  int32_t* to = static_cast<int32_t*>(sections.mutable_data_ptr());
  for (int i = 0; i < all.count; ++i) {
    const auto at = all.at(i);
    const auto tiles = tiles_of(at, optimizer::hopper::tiles_along(k));
    for (const int number : {at.square.matrix, at.square.row, at.square.col, at.section, at.sections, at.number,
                             tiles.first, tiles.count}) {
      *to++ = number;
    }
  }
}

// The row of each index of a walk through a lower triangle, both int32.
void triangle_rows(const Tensor& rows, const Tensor& indices) {
  const int32_t* const from = static_cast<const int32_t*>(indices.const_data_ptr());
  std::transform(from, from + indices.numel(), static_cast<int32_t*>(rows.mutable_data_ptr()),
                 [](int32_t index) { return optimizer::hopper::triangle_row(index); });
}

}  // namespace

STABLE_TORCH_LIBRARY(hopper_model, operations) {
  operations.def(
      "product(Tensor(a!) C, Tensor A, Tensor B, Tensor? D, float alpha, float beta, float diagonal, int sections, "
      "int clusters, int together, int seed, int omitted, int piece) -> ()");
  operations.def("sections(Tensor(a!) sections, int count, int m, int k, int into) -> ()");
  operations.def("triangle_rows(Tensor(a!) rows, Tensor indices) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hopper_model, CPU, operations) {
  operations.impl("product", TORCH_BOX(&product));
  operations.impl("sections", TORCH_BOX(&sections));
  operations.impl("triangle_rows", TORCH_BOX(&triangle_rows));
}
