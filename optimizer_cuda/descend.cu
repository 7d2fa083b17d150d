// descend_ on the GPU: one pass over parameters and updates, one thread block per tile.
//
// The formula of one element is in element.h, the checked arguments are in descend.h; tiles.cuh launches kernels. If no
// norms are wanted, tiles whose rows are runs of memory in all tensors are moved in chunks. So are square ones whose
// lines start where an access does and lie along the same dimension in all; the others go through shared memory
// (exchange.cuh). Where norms are wanted, squares.cuh sums the squares of the updates, also those of matrices that stay
// as they are.
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

// What a kernel can do besides the plain step: look at the places of elements, and join halves, too. Each is a kernel
// of its own, so that the plain one holds no registers for the others.
enum class Kind { kPlain, kPlaced, kJoined };

// The dtype of the parameters: halves are joined of bfloat16 and remainders alone.
template <Kind kind>
__device__ ScalarType dtype_of_parameters(const DescendLaunch& call) {
  return kind == Kind::kJoined ? ScalarType::BFloat16 : call.dtypes[kParameter];
}

__device__ inline char* address_of_remainder(const Matrix<3>& m, int64_t row, int64_t col) {
  return address(m.views[kRemainder], ScalarType::Short, row, col);
}

// The step of one matrix.
template <class T, Kind kind>
struct Step {
  Descent<T> by;
  Place place;
  const float* row_scale;
  bool rounds_stochastically;
  uint64_t key;
  Grid<T> grid;

  __device__ T operator()(T parameter, T update, int64_t row, int64_t col) const {
    if constexpr (kind == Kind::kPlain) {
      return descend(parameter, update, by, T(1));
    }
    const T result = descend(parameter, update, by, row_scale ? T(row_scale[place.first_row + row]) : T(1));
    if (!rounds_stochastically) {
      return result;
    }
    const uint64_t index = place.origin + row * place.row_length + col;
    return round_stochastically(result, random_bits(key, index), grid);
  }
};

template <class T, Kind kind>
__device__ Step<T, kind> make_step(const DescendLaunch& call, const DescendEntry& entry) {
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

// Moves the parameters of a chunk by `update`; `in_chunks`: whether the widest accesses take a whole chunk of them.
template <class T, Kind kind>
__device__ void descend_chunk(const T (&update)[kChunk], const DescendLaunch& call, const Matrix<3>& m, const Box& box,
                              const Chunk& chunk, const Step<T, kind>& step, bool in_chunks) {
  const ScalarType dtype = dtype_of_parameters<kind>(call);
  const int64_t row = box.row + chunk.row, col = box.col + chunk.col;
  char* const at = address(m.views[kParameter], dtype, row, col);
  T parameter[kChunk], remainder[kChunk];
  load(parameter, dtype, at, chunk.count, in_chunks);
  if constexpr (kind == Kind::kJoined) {
    load_as<T, int16_t>(remainder, address_of_remainder(m, row, col), chunk.count, in_chunks);
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if constexpr (kind == Kind::kJoined) {
      parameter[i] = join<T>({parameter[i], remainder[i]});
    }
    // What lies past the end of a line is not stored. Rows have no scale there, so it takes that of the last place.
    const int place = min(i, chunk.count - 1);
    parameter[i] = step(parameter[i], update[i], box.row + chunk.row_of(place), box.col + chunk.col_of(place));
  }
  if constexpr (kind == Kind::kJoined) {
    split_chunk(parameter, remainder);
    store_as<T, int16_t>(remainder, address_of_remainder(m, row, col), chunk.count, in_chunks);
  }
  store(parameter, dtype, at, chunk.count, in_chunks);
}

template <class T>
__device__ void load_updates(T (&update)[kChunk], const DescendLaunch& call, const DescendEntry& entry, const Box& box,
                             const Chunk& chunk) {
  const ScalarType dtype = call.dtypes[kUpdate];
  const char* from = address(entry.matrix.views[kUpdate], dtype, box.row + chunk.row, box.col + chunk.col);
  load(update, dtype, from, chunk.count, entry.in_chunks[kUpdate]);
}

template <class T, Kind kind>
__device__ void descend_place(T update, const DescendLaunch& call, const Matrix<3>& m, int64_t row, int64_t col,
                              const Step<T, kind>& step) {
  const ScalarType dtype = dtype_of_parameters<kind>(call);
  char* const at = address(m.views[kParameter], dtype, row, col);
  const T parameter = load_one<T>(dtype, at);
  if constexpr (kind == Kind::kJoined) {
    auto* const remainder = reinterpret_cast<int16_t*>(address_of_remainder(m, row, col));
    const Halves<T> halves = split(step(join<T>({parameter, widen<T>(*remainder)}), update, row, col));
    *remainder = narrow<int16_t>(halves.remainder);
    store_one(halves.upper, dtype, at);
  } else {
    store_one(step(parameter, update, row, col), dtype, at);
  }
}

// Moves parameters by the updates in a tile.
template <class T, Kind kind>
__device__ void descend_tile(const Exchange<T>& updates, const DescendLaunch& call, const DescendEntry& entry,
                             const Box& box, const Step<T, kind>& step) {
  const Matrix<3>& m = entry.matrix;
  const bool along_rows = lies_along_rows(m.views[kParameter]);
  if (entry.in_chunks[kParameter] && entry.in_chunks[kRemainder] &&
      lies_along_rows(m.views[kRemainder]) == along_rows) {
    for_each_chunk_of_tile(box, along_rows, [&](const Chunk& chunk, int) {
      T update[kChunk];
      from_tile(update, updates, chunk);
      descend_chunk<T, kind>(update, call, m, box, chunk, step, true);
    });
  } else {
    for_each_place(box, m.views[kParameter], [&](int row, int col, int) {
      descend_place<T, kind>(updates[row][col], call, m, box.row + row, box.col + col, step);
    });
  }
}

template <class T, Kind kind>
__global__ void __launch_bounds__(kThreads, kind == Kind::kPlain ? kManyBlocks : kFewBlocks)
    descend_kernel(const __grid_constant__ DescendLaunch call) {
  __shared__ Exchange<T> updates;
  const DescendEntry& entry = find_entry(call, blockIdx.x);
  const bool is_open = entry.is_open && call.device_gate.is_open(entry.matrix.index);
  if (!is_open && !call.sums) {
    return;
  }
  const Matrix<3>& m = entry.matrix;
  const Box box = tile_box(m, blockIdx.x);
  const Step<T, kind> step = make_step<T, kind>(call, entry);
  if (entry.by_runs) {
    const bool in_chunks = entry.in_chunks[kParameter] && entry.in_chunks[kRemainder];
    for_each_chunk(box, [&](const Chunk& chunk) {
      T update[kChunk];
      load_updates(update, call, entry, box, chunk);
      descend_chunk<T, kind>(update, call, m, box, chunk, step, in_chunks);
    });
    return;
  }
  double squares;  // of floats, whatever T is
  if (entry.is_direct) {
    squares = squares_of_chunks(updates, ScalarType::Float, m.squares, box, lies_along_rows(m.views[kParameter]),
                                [&](const Chunk& chunk, T(&update)[kChunk]) {
                                  load_updates(update, call, entry, box, chunk);
                                  if (is_open) {
                                    descend_chunk<T, kind>(update, call, m, box, chunk, step, true);
                                  }
                                });
  } else {
    load_tile(updates, m.views[kUpdate], call.dtypes[kUpdate], box, entry.in_chunks[kUpdate]);
    __syncthreads();
    if (is_open) {
      descend_tile<T, kind>(updates, call, entry, box, step);
    }
    squares = call.sums ? squares_of_tile(updates, ScalarType::Float, m.squares, box) : 0;
  }
  if (call.sums) {
    write_tile_sum(call.sums, squares, m, box);
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
  const bool is_placed = call.row_scale || parameters.rounds_stochastically;
  const auto placed = call.in_double() ? descend_kernel<double, Kind::kPlaced> : descend_kernel<float, Kind::kPlaced>;
  const auto joined = call.in_double() ? descend_kernel<double, Kind::kJoined> : descend_kernel<float, Kind::kJoined>;
  const auto plain = call.in_double() ? placed : descend_kernel<float, Kind::kPlain>;
  const auto kernel = call.has_remainder ? joined : is_placed ? placed : plain;
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
