// The checked arguments of descend_; its contract is in torch-ext/optimizer/kernels/native.py.
#pragma once

#include "arguments.h"

namespace optimizer {

enum DescendView { kParameter, kUpdate };

// What varies from matrix to matrix besides its tensors.
struct Place {
  int64_t first_row;   // its first entry of row_scale
  int64_t origin;      // index of its first element in the whole matrix
  int64_t row_length;  // of the whole matrix
};

struct Descend {
  std::vector<Matrix<2>> matrices;
  std::vector<Place> places;
  ScalarType dtypes[2];
  bool in_double;
  Numbers lr, weight_decay, multiplier;
  int64_t decay_mode;
  const float* row_scale;  // null where not given
  Values<int64_t> seeds;
  Gate gate;
};

inline Place check_place(const MaybeInts& origins, const Tensor& parameter, int64_t i, int64_t first_row) {
  const int64_t rows = parameter.size(0), cols = parameter.size(1);
  if (!origins) {
    return {first_row, 0, cols};
  }
  const int64_t *of = origins->data() + 3 * i, row_length = of[2];
  STD_TORCH_CHECK(of[0] >= 0 && of[1] >= 0 && of[1] + cols <= row_length, "origins of matrix ", i,
                  " must be (first_row, first_col, row_length) of a whole around its ", rows, " x ", cols,
                  " elements, got (", of[0], ", ", of[1], ", ", row_length, ")");
  return {first_row, of[0] * row_length + of[1], row_length};
}

inline const float* check_row_scale(const MaybeTensor& row_scale, int64_t rows, const Tensor& update) {
  if (!row_scale) {
    return nullptr;
  }
  const Values<float> scale = values<float>("row_scale", row_scale, ScalarType::Float, rows, update);
  STD_TORCH_CHECK(row_scale->device() == update.device(), "row_scale must be on ", place(update), ", got ",
                  place(*row_scale));
  return scale.data;
}

// As many arguments as the op has.
inline Descend check_descend(const Tensors& parameter, const Tensor& update, const Tensor& lr,
                             const Tensor& weight_decay, const Tensor& multiplier, int64_t decay_mode,
                             const MaybeInts& offsets, const MaybeTensor& row_scale, const MaybeTensor& seeds,
                             const MaybeInts& origins, const MaybeTensor& active, const MaybeTensor& found_inf) {
  const int64_t count = parameter.size();
  check_matrices("parameter", parameter, update);
  check_buffer("update", update, parameter, offsets);
  STD_TORCH_CHECK(decay_mode >= kDecoupled && decay_mode <= kCautious,
                  "decay_mode must be 0 (decoupled), 1 (independent) or 2 (cautious), got ", decay_mode);
  STD_TORCH_CHECK(!seeds || is_half(dtype_of(parameter)) || count == 0,
                  "seeds ask for stochastic rounding, which is for float16 and bfloat16 parameters, got ",
                  dtype_of(parameter));
  STD_TORCH_CHECK(!origins || static_cast<int64_t>(origins->size()) == 3 * count, "origins must be 3 per matrix, ",
                  3 * count, ", got ", origins ? origins->size() : 0);
  std::vector<Place> places;
  int64_t rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor& p = parameter[i];
    check_written("parameter", p);
    STD_TORCH_CHECK(p.numel() == 0 || p.const_data_ptr() != update.const_data_ptr(), "parameter[", i,
                    "] must not be the update");
    places.push_back(check_place(origins, p, i, rows));
    rows += p.size(0);
  }
  Descend call{{},
               std::move(places),
               {dtype_of(parameter), update.scalar_type()},
               dtype_of(parameter) == ScalarType::Double || update.scalar_type() == ScalarType::Double,
               numbers("lr", lr, count, update),
               numbers("weight_decay", weight_decay, count, update),
               numbers("multiplier", multiplier, count, update),
               decay_mode,
               check_row_scale(row_scale, rows, update),
               values<int64_t>("seeds", seeds, ScalarType::Long, count, update),
               gate(active, found_inf, count, update)};
  for (int64_t i = 0; i < count; ++i) {
    const View views[] = {view_of(parameter[i], true), part_of(update, false, offsets, parameter[i], i)};
    Matrix<2> matrix{parameter[i].size(0), parameter[i].size(1), {views[0], views[1]}, i};
    // A single row has one scale, and its elements one running index in the whole matrix.
    if (is_one_run(matrix) && !call.row_scale && call.places[i].row_length == matrix.cols) {
      collapse(matrix);
    }
    call.matrices.push_back(matrix);
  }
  return call;
}

}  // namespace optimizer
