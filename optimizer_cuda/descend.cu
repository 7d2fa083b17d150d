// descend_ on the GPU: one pass over parameters and updates, one thread block per tile.
//
// The formula of one element is in element.h, the checked arguments are in descend.h; tiles.cuh moves tiles and
// launches kernels. Tiles whose rows are runs of memory are moved in chunks, the others through shared memory.
// Where norms are wanted, squares.cuh sums the squares of the updates, also those of matrices that stay as they are.
#include "../optimizer_common/descend.h"
#include "squares.cuh"

namespace optimizer {
namespace {

struct DescendEntry : Entry<3> {
  Place place;
  double lr, weight_decay, multiplier;
  int64_t seed;
};

struct DescendLaunch {
  DescendEntry entries[kMatrices];
  int count;
  ScalarType dtypes[3];
  int64_t decay_mode;
  const float* row_scale;
  bool rounds_stochastically;
  Numbers device_lr, device_weight_decay, device_multiplier;  // each in place of the entry's, where given
  Values<int64_t> device_seeds;
  Gate device_gate;
  double* sums;  // of each tile's squares, where norms are wanted
};
static_assert(sizeof(DescendLaunch) <= kMostParameterBytes);

// The step of one matrix.
template <class T>
struct Step {
  Descent<T> by;
  Place place;
  const float* row_scale;
  bool rounds_stochastically;
  uint64_t key;
  Grid<T> grid;

  __device__ T operator()(T parameter, T update, int64_t row, int64_t col) const {
    const T result = descend(parameter, update, by, row_scale ? T(row_scale[place.first_row + row]) : T(1));
    if (!rounds_stochastically) {
      return result;
    }
    const uint64_t index = place.origin + row * place.row_length + col;
    return round_stochastically(result, random_bits(key, index), grid);
  }
};

template <class T>
__device__ Step<T> make_step(const DescendLaunch& call, const DescendEntry& entry) {
  const int64_t i = entry.matrix.index;
  return {make_descent<T>(call.device_lr.get(i, entry.lr), call.device_weight_decay.get(i, entry.weight_decay),
                          call.device_multiplier.get(i, entry.multiplier), call.decay_mode),
          entry.place,
          call.row_scale,
          call.rounds_stochastically,
          make_key(call.device_seeds.get(i, entry.seed)),
          make_grid<T>(call.dtypes[kParameter])};
}

// Leaves the upper halves in `values`.
template <class T>
__device__ void split_chunk(T (&values)[kChunk], T (&remainder)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const Halves<T> halves = split(values[i]);
    values[i] = halves.upper;
    remainder[i] = halves.remainder;
  }
}

// `updates` is written only where squares are summed.
template <class T, bool has_remainder>
__device__ void descend_chunks(Exchange<T>& updates, const DescendLaunch& call, const DescendEntry& entry,
                               const Box& box, const Step<T>& step) {
  const Matrix<3>& m = entry.matrix;
  for_each_chunk(box, [&](int row, int col, int count) {
    const auto at = [&](int k) { return address(m.views[k], call.dtypes[k], box.row + row, box.col + col); };
    T parameter[kChunk], update[kChunk], remainder[kChunk];
    load(parameter, call.dtypes[kParameter], at(kParameter), count, entry.aligned);
    load(update, call.dtypes[kUpdate], at(kUpdate), count, entry.aligned);
    if constexpr (has_remainder) {
      load(remainder, call.dtypes[kRemainder], at(kRemainder), count, entry.aligned);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if constexpr (has_remainder) {
        parameter[i] = join<T>({parameter[i], remainder[i]});
      }
      parameter[i] = step(parameter[i], update[i], box.row + row, box.col + col + i);
    }
    if constexpr (has_remainder) {
      split_chunk(parameter, remainder);
      store(remainder, call.dtypes[kRemainder], at(kRemainder), count, entry.aligned);
    }
    store(parameter, call.dtypes[kParameter], at(kParameter), count, entry.aligned);
    if (call.sums) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        updates[row][col + i] = update[i];
      }
    }
  });
  if (call.sums) {
    __syncthreads();
  }
}

// Only reads the updates of a matrix that is not open.
template <class T, bool has_remainder>
__device__ void descend_elements(Exchange<T>& updates, const DescendLaunch& call, const Matrix<3>& m, const Box& box,
                                 const Step<T>& step, bool is_open) {
  const auto at = [&](int k, int row, int col) {
    return address(m.views[k], call.dtypes[k], box.row + row, box.col + col);
  };
  for_each_element(box, m.views[kUpdate], [&](int row, int col) {
    updates[row][col] = load_one<T>(call.dtypes[kUpdate], at(kUpdate, row, col));
  });
  __syncthreads();
  if (!is_open) {
    return;
  }
  for_each_element(box, m.views[kParameter], [&](int row, int col) {
    char* place = at(kParameter, row, col);
    const T parameter = load_one<T>(call.dtypes[kParameter], place);
    if constexpr (has_remainder) {
      char* rest = at(kRemainder, row, col);
      const T joined = join<T>({parameter, load_one<T>(call.dtypes[kRemainder], rest)});
      const Halves<T> halves = split(step(joined, updates[row][col], box.row + row, box.col + col));
      store_one(halves.remainder, call.dtypes[kRemainder], rest);
      store_one(halves.upper, call.dtypes[kParameter], place);
    } else {
      store_one(step(parameter, updates[row][col], box.row + row, box.col + col), call.dtypes[kParameter], place);
    }
  });
}

// Kernels of their own for halves, whose registers the others need not hold.
template <class T, bool has_remainder>
__global__ void __launch_bounds__(kThreads) descend_kernel(const __grid_constant__ DescendLaunch call) {
  __shared__ Exchange<T> updates;
  const DescendEntry& entry = find_entry(call, blockIdx.x);
  const bool is_open = entry.is_open && call.device_gate.is_open(entry.matrix.index);
  if (!is_open && !call.sums) {
    return;
  }
  const Box box = tile_box(entry.matrix, blockIdx.x);
  const Step<T> step = make_step<T>(call, entry);
  if (entry.by_runs && is_open) {
    descend_chunks<T, has_remainder>(updates, call, entry, box, step);
  } else {
    descend_elements<T, has_remainder>(updates, call, entry.matrix, box, step, is_open);
  }
  if (call.sums) {  // of floats, whatever T is
    write_tile_sum(call.sums, updates, ScalarType::Float, entry.matrix, box);
  }
}

}  // namespace

void descend_cuda(const Descend& call) {
  DescendLaunch parameters{};
  std::copy_n(call.dtypes, 3, parameters.dtypes);
  parameters.decay_mode = call.decay_mode;
  parameters.row_scale = call.row_scale;
  parameters.rounds_stochastically = call.seeds.data != nullptr;
  parameters.device_lr = call.lr.where(kDevice);
  parameters.device_weight_decay = call.weight_decay.where(kDevice);
  parameters.device_multiplier = call.multiplier.where(kDevice);
  parameters.device_seeds = call.seeds.where(kDevice);
  parameters.device_gate = call.gate.where(kDevice);
  const auto plain = call.in_double() ? descend_kernel<double, false> : descend_kernel<float, false>;
  const auto joined = call.in_double() ? descend_kernel<double, true> : descend_kernel<float, true>;
  const auto kernel = call.has_remainder ? joined : plain;
  const auto fill = [&](DescendEntry& entry) {
    const int64_t i = entry.matrix.index;
    entry.place = call.places[i];
    entry.lr = call.lr.where(kHost).get(i, 0);
    entry.weight_decay = call.weight_decay.where(kHost).get(i, 0);
    entry.multiplier = call.multiplier.where(kHost).get(i, 0);
    entry.seed = call.seeds.where(kHost).get(i, 0);
  };
  launch_with_norms(call, parameters, [&] { launch_all(call, parameters, kernel, fill); });
}

}  // namespace optimizer
