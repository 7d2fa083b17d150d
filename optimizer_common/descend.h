// The checked arguments of descend_; its contract is in torch-ext/optimizer/kernels/portable/descend.py.
#pragma once

#include "normalize.h"
#include "numbers.h"

namespace optimizer {

enum DescendView { kParameter, kUpdate, kRemainder };

// What varies from matrix to matrix besides its tensors.
struct Place {
  int64_t first_row;   // its first entry of row_scale
  int64_t origin;      // index of its first element in the whole matrix
  int64_t row_length;  // of the whole matrix
};

struct Descend {
  ScalarType dtypes[3];
  bool has_remainder;  // else its views are the parameter's, and nobody looks at them
  Numbers lr, weight_decay, multiplier;
  int64_t decay_mode;
  const float* row_scale;  // null where not given
  Values<int64_t> seeds;
  Gate gate;
  int32_t device;             // of the matrices
  std::vector<Place> places;  // one for each matrix
  std::vector<Matrix<3>> matrices;
  MaybeTensor norms;  // of each update, if they are wanted

  bool in_double() const { return std::count(dtypes, dtypes + 2, ScalarType::Double) > 0; }
};

void descend_cpu(const Descend& call);
void descend_cuda(const Descend& call);

inline Place check_place(const MaybeInts& origins, const Tensor& parameter, int64_t i, int64_t first_row) {
  const int64_t rows = parameter.size(0), cols = parameter.size(1);
  if (!origins) {
    return {first_row, 0, cols};
  }
  const int64_t *of = origins->data() + 3 * i, row_length = of[2];
  const int64_t most_rows = std::numeric_limits<int64_t>::max() / std::max<int64_t>(row_length, 1);
  STD_TORCH_CHECK(of[0] >= 0 && of[1] >= 0 && cols <= row_length && of[1] <= row_length - cols &&
                  of[0] <= most_rows - rows, "origins of matrix ", i,
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

inline std::vector<Place> check_places(const Tensors& parameter, const MaybeInts& origins) {
  const size_t needed = 3 * parameter.size();
  STD_TORCH_CHECK(!origins || origins->size() == needed, "origins must be 3 per matrix, ", needed, ", got ",
                  origins ? origins->size() : 0);
  std::vector<Place> places;
  int64_t rows = 0;
  for (size_t i = 0; i < parameter.size(); ++i) {
    places.push_back(check_place(origins, parameter[i], i, rows));
    rows += parameter[i].size(0);
  }
  return places;
}

inline void check_remainder(const MaybeTensors& remainder, const Tensors& parameter, const MaybeTensor& seeds) {
  if (!remainder) {
    return;
  }
  STD_TORCH_CHECK(!seeds, "seeds round stochastically, and with a remainder nothing is left to round");
  STD_TORCH_CHECK(remainder->size() == parameter.size(), "remainder must be one per matrix, ", parameter.size(),
                  ", got ", remainder->size());
  for (size_t i = 0; i < parameter.size(); ++i) {
    const Tensor &p = parameter[i], &r = (*remainder)[i];
    STD_TORCH_CHECK(p.scalar_type() == ScalarType::BFloat16,
                    "a remainder is what bfloat16 parameters lack of float32, got parameters of ", p.scalar_type());
    STD_TORCH_CHECK(r.scalar_type() == ScalarType::Short, "remainder must be Short, got ", r.scalar_type(), " at ", i);
    STD_TORCH_CHECK(r.dim() == 2 && r.size(0) == p.size(0) && r.size(1) == p.size(1), "remainder[", i,
                    "] must have the shape ", shape(p), " of its parameter, got ", shape(r));
    STD_TORCH_CHECK(r.device() == p.device(), "remainder must be on ", place(p), " like the parameters, got ", place(r));
  }
}

inline std::vector<Matrix<3>> descend_matrices(const Tensors& parameter, const Tensor& update, const MaybeInts& offsets,
                                               const MaybeTensors& remainder, const Descend& call) {
  std::vector<Matrix<3>> matrices;
  for (int64_t i = 0; i < static_cast<int64_t>(parameter.size()); ++i) {
    const Tensor& p = parameter[i];
    const View views[] = {view_of(p, true), part_of(update, false, offsets, p, i),
                          view_of(remainder ? (*remainder)[i] : p, true)};
    Matrix<3> matrix{p.size(0), p.size(1), {views[0], views[1], views[2]}, i};
    matrix.squares = squares_for(call.norms, p);
    if (!call.row_scale && !call.seeds.data) {
      simplify(matrix);
    } else if (!call.row_scale && !call.norms && is_one_run(matrix) && call.places[i].row_length == matrix.cols) {
      collapse(matrix);  // the places of its elements are one running index
    }
    matrices.push_back(matrix);
  }
  return matrices;
}

// As many arguments as the op has.
inline Descend check_descend(const Tensors& parameter, const Tensor& update, const Tensor& lr,
                             const Tensor& weight_decay, const Tensor& multiplier, int64_t decay_mode,
                             const MaybeInts& offsets, const MaybeTensor& row_scale, const MaybeTensor& seeds,
                             const MaybeInts& origins, const MaybeTensor& active, const MaybeTensor& found_inf,
                             const MaybeTensors& remainder, const MaybeTensor& norms) {
  const int64_t count = parameter.size();
  const ScalarType dtype = dtype_of(parameter);
  check_matrices("parameter", parameter, update);
  check_buffer("update", update, parameter, offsets);
  check_norms_of("update", update, offsets, norms);
  STD_TORCH_CHECK(decay_mode >= kDecoupled && decay_mode <= kCautious,
                  "decay_mode must be 0 (decoupled), 1 (independent) or 2 (cautious), got ", decay_mode);
  STD_TORCH_CHECK(!seeds || is_half(dtype) || count == 0,
                  "seeds ask for stochastic rounding, which is for float16 and bfloat16 parameters, got ", dtype);
  check_remainder(remainder, parameter, seeds);
  Spans spans(2 * parameter.size() + 9);
  int64_t rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    spans.write("parameter", parameter[i], i);
    if (remainder) {
      spans.write("remainder", (*remainder)[i], i);
    }
    rows += parameter[i].size(0);
  }
  const std::pair<const char*, MaybeTensor> inputs[] = {
      {"update", update}, {"lr", lr},         {"weight_decay", weight_decay}, {"multiplier", multiplier},
      {"seeds", seeds},   {"active", active}, {"row_scale", row_scale},       {"found_inf", found_inf}};
  for (const auto& [name, input] : inputs) {
    spans.read(name, input);
  }
  if (norms) {
    spans.write("norms", *norms);
  }
  spans.check();
  Descend call{.dtypes = {dtype, update.scalar_type(), remainder ? ScalarType::Short : dtype},
               .has_remainder = remainder.has_value(),
               .lr = numbers("lr", lr, count, update),
               .weight_decay = numbers("weight_decay", weight_decay, count, update),
               .multiplier = numbers("multiplier", multiplier, count, update),
               .decay_mode = decay_mode,
               .row_scale = check_row_scale(row_scale, rows, update),
               .seeds = values<int64_t>("seeds", seeds, ScalarType::Long, count, update),
               .gate = gate(active, found_inf, count, update),
               .device = update.get_device_index(),
               .places = check_places(parameter, origins),
               .norms = norms};
  call.matrices = descend_matrices(parameter, update, offsets, remainder, call);
  return call;
}

}  // namespace optimizer
