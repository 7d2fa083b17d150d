// descend_ on the CPU: one pass over parameters and updates, tile by tile, by threads that take turns.
//
// The formula of one element is in element.h, the checked arguments are in descend.h; matrices.h cuts matrices into
// tiles, tiles.h moves a tile between memory and arrays of T, squares.h sums squares.
#include "../optimizer_common/descend.h"
#include "squares.h"

namespace optimizer {
namespace {

template <class T>
OPTIMIZER_INLINE void round_tile(T* values, const Descend& call, const Matrix<3>& m, const Box& box) {
  const Grid<T> grid = make_grid<T>(call.dtypes[kParameter]);
  const Place& place = call.places[m.index];
  const uint64_t key = make_key(call.seeds[m.index]);
  for (int64_t r = 0; r < box.rows; ++r) {
    const uint64_t first = place.origin + (box.row + r) * place.row_length + box.col;
    T* row = values + r * box.cols;
    for (int64_t c = 0; c < box.cols; ++c) {
      row[c] = round_stochastically(row[c], random_bits(key, first + c), grid);
    }
  }
}

// Makes of bfloat16 values the float32 ones, of which a tile of remainders has the lower halves.
template <class T>
OPTIMIZER_INLINE void join_tile(T* values, const Descend& call, const Matrix<3>& m, const Box& box) {
  T remainder[kTileArea];
  load(remainder, call.dtypes[kRemainder], m.views[kRemainder], box);
  for (int64_t i = 0; i < box.rows * box.cols; ++i) {
    values[i] = join<T>({values[i], remainder[i]});
  }
}

// Leaves the upper halves in `values` and stores the remainders.
template <class T>
OPTIMIZER_INLINE void split_tile(T* values, const Descend& call, const Matrix<3>& m, const Box& box) {
  T remainder[kTileArea];
  for (int64_t i = 0; i < box.rows * box.cols; ++i) {
    const Halves<T> halves = split(values[i]);
    values[i] = halves.upper;
    remainder[i] = halves.remainder;
  }
  store(remainder, call.dtypes[kRemainder], m.views[kRemainder], box);
}

// Where norms are wanted, it takes the squares of the updates, too.
template <class T>
OPTIMIZER_INLINE void load_updates(T* update, const Descend& call, UnitSums& sums, const Matrix<3>& m, const Box& box) {
  load(update, call.dtypes[kUpdate], m.views[kUpdate], box);
  if (m.squares == Squares::kByRows) {
    sums.take_values(m.index, update, box);
  } else if (m.squares == Squares::kByColumns) {  // loads them again, from the nearest cache
    sums.take_lines(m, call.dtypes[kUpdate], m.views[kUpdate], box);
  }
}

template <class T>
OPTIMIZER_INLINE void descend_tile(const Descend& call, UnitSums& sums, const Matrix<3>& m, const Box& box) {
  const bool is_open = call.gate.is_open(m.index);
  if (!is_open && !call.norms) {
    return;
  }
  T parameter[kTileArea], update[kTileArea];
  load_updates(update, call, sums, m, box);
  if (!is_open) {
    return;
  }
  const Descent<T> by =
      make_descent<T>(call.lr[m.index], call.weight_decay[m.index], call.multiplier[m.index], call.decay_mode);
  load(parameter, call.dtypes[kParameter], m.views[kParameter], box);
  if (call.has_remainder) {
    join_tile(parameter, call, m, box);
  }
  for (int64_t r = 0; r < box.rows; ++r) {
    const T scale = call.row_scale ? call.row_scale[call.places[m.index].first_row + box.row + r] : T(1);
    T *p = parameter + r * box.cols, *u = update + r * box.cols;
    for_each_of_row(box.cols,
                    [&](int64_t c) __attribute__((always_inline)) { p[c] = descend(p[c], u[c], by, scale); });
  }
  if (call.seeds.data) {
    round_tile(parameter, call, m, box);
  }
  if (call.has_remainder) {
    split_tile(parameter, call, m, box);
  }
  store(parameter, call.dtypes[kParameter], m.views[kParameter], box);
}

OPTIMIZER_CLONES void descend_in_float(const Descend& call, UnitSums& sums, const Matrix<3>& m, const Box& box) {
  descend_tile<float>(call, sums, m, box);
}

OPTIMIZER_CLONES void descend_in_double(const Descend& call, UnitSums& sums, const Matrix<3>& m, const Box& box) {
  descend_tile<double>(call, sums, m, box);
}

}  // namespace

void descend_cpu(const Descend& call) {
  const auto descend = call.in_double() ? descend_in_double : descend_in_float;
  UnitSums sums = unit_sums(call.norms, call.matrices);
  std::vector<Matrix<3>> list = call.matrices;
  if (!call.row_scale && !call.seeds.data) {  // which have a place by row and column
    std::for_each(list.begin(), list.end(), collapse_whole_units<3>);
  }
  for_each_tile(std::move(list), [&](const auto& m, const Box& box) { descend(call, sums, m, box); });
  if (call.norms) {
    sums.write_norms(static_cast<double*>(call.norms->mutable_data_ptr()));
  }
}

}  // namespace optimizer
