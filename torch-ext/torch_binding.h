#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace optimizer {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;
using MaybeInts = std::optional<std::vector<int64_t>>;

void momentum_pack_cpu(const Tensors& momentum, const Tensors& gradient, const Tensor& packed, double beta,
                       bool nesterov, bool maximize, const MaybeInts& offsets, const MaybeTensor& active,
                       const MaybeTensor& grad_scale, const MaybeTensor& found_inf);

void momentum_pack_cuda(const Tensors& momentum, const Tensors& gradient, const Tensor& packed, double beta,
                        bool nesterov, bool maximize, const MaybeInts& offsets, const MaybeTensor& active,
                        const MaybeTensor& grad_scale, const MaybeTensor& found_inf);

void descend_cpu(const Tensors& parameter, const Tensor& update, const Tensor& lr, const Tensor& weight_decay,
                 const Tensor& multiplier, int64_t decay_mode, const MaybeInts& offsets, const MaybeTensor& row_scale,
                 const MaybeTensor& seeds, const MaybeInts& origins, const MaybeTensor& active,
                 const MaybeTensor& found_inf);

void descend_cuda(const Tensors& parameter, const Tensor& update, const Tensor& lr, const Tensor& weight_decay,
                  const Tensor& multiplier, int64_t decay_mode, const MaybeInts& offsets, const MaybeTensor& row_scale,
                  const MaybeTensor& seeds, const MaybeInts& origins, const MaybeTensor& active,
                  const MaybeTensor& found_inf);

// A string argument as it comes out of the dispatcher, owned by whom it is handed to: torch 2.13's own
// conversion to std::string leaks.
using String = StringHandle;

void gemm_cpu(const Tensor& c, const Tensor& a, const Tensor& b, const MaybeTensor& d, double alpha, double beta,
              bool symmetric, String instructions);

std::string gemm_instructions();

}  // namespace optimizer
