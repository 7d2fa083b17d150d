// momentum_pack_ on the GPU: one pass over gradients, momentum and the packed batch, one thread block per tile.
//
// The formula of one element is in element.h, the checked arguments are in momentum_pack.h; tiles.cuh launches kernels.
// If no norms are wanted, tiles whose rows are runs of memory in all tensors are moved in chunks. So are square ones
// whose lines start where an access does and lie along the same dimension in all; the others go through shared memory
// (exchange.cuh), as do those of momentum in 8 bits (momentum_codes.cuh). Where norms are wanted, squares.cuh sums the
// squares of what is packed.
#include "momentum_codes.cuh"

namespace optimizer {
namespace {

// Packs a chunk that lies alike in all tensors; `update` is what is packed.
template <class T>
__device__ void pack_chunk(T (&update)[kChunk], const PackLaunch& call, const PackEntry& entry, const Box& box,
                           const Chunk& chunk, const Averaging<T>& average, bool is_open) {
  const Matrix<3>& m = entry.matrix;
  const auto at = [&](int k) { return address(m.views[k], call.dtypes[k], box.row + chunk.row, box.col + chunk.col); };
  T momentum[kChunk];
#pragma unroll
  for (T& element : update) {
    element = 0;
  }
  if (is_open) {
    load(momentum, call.dtypes[kMomentum], at(kMomentum), chunk.count, entry.in_chunks[kMomentum]);
    load(update, call.dtypes[kGradient], at(kGradient), chunk.count, entry.in_chunks[kGradient]);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      update[i] = average(momentum[i], update[i]);
    }
    store(momentum, call.dtypes[kMomentum], at(kMomentum), chunk.count, entry.in_chunks[kMomentum]);
  }
  store(update, call.dtypes[kPacked], at(kPacked), chunk.count, entry.in_chunks[kPacked]);
}

// Averages the gradients in a tile, which become updates, into momentum.
template <class T>
__device__ void average_tile(Exchange<T>& tile, const PackLaunch& call, const PackEntry& entry, const Box& box,
                             const Averaging<T>& average) {
  const View& view = entry.matrix.views[kMomentum];
  const ScalarType dtype = call.dtypes[kMomentum];
  const auto at = [&](int row, int col) { return address(view, dtype, box.row + row, box.col + col); };
  if (entry.in_chunks[kMomentum]) {
    for_each_chunk_of_tile(box, lies_along_rows(view), [&](const Chunk& chunk, int) {
      T momentum[kChunk], update[kChunk];
      load(momentum, dtype, at(chunk.row, chunk.col), chunk.count, true);
      from_tile(update, tile, chunk);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        update[i] = average(momentum[i], update[i]);
      }
      to_tile(tile, update, chunk);
      store(momentum, dtype, at(chunk.row, chunk.col), chunk.count, true);
    });
  } else {
    for_each_place(box, view, [&](int row, int col, int) {
      T momentum = load_one<T>(dtype, at(row, col));
      tile[row][col] = average(momentum, tile[row][col]);
      store_one(momentum, dtype, at(row, col));
    });
  }
}

// Gradients, or zeros where nothing is to be read.
template <class T>
__device__ void load_gradients(Exchange<T>& tile, const PackLaunch& call, const PackEntry& entry, const Box& box,
                               bool is_open) {
  const View& view = entry.matrix.views[kGradient];
  if (is_open) {
    load_tile(tile, view, call.dtypes[kGradient], box, entry.in_chunks[kGradient]);
  } else {
    for_each_place(box, view, [&](int row, int col, int) { tile[row][col] = 0; });
  }
  __syncthreads();
}

// Stores the updates in a tile; returns the calling thread's part of their squares, if these are wanted.
template <class T>
__device__ double pack_tile(const Exchange<T>& tile, const PackLaunch& call, const PackEntry& entry, const Box& box) {
  const Matrix<3>& m = entry.matrix;
  const ScalarType dtype = call.dtypes[kPacked];
  const auto update = [&](int row, int col) { return tile[row][col]; };
  store_tile<T>(update, m.views[kPacked], dtype, box, entry.in_chunks[kPacked]);
  return call.sums ? squares_of_tile(tile, dtype, m.squares, box) : 0;
}

template <class T>
__global__ void __launch_bounds__(kThreads, std::is_same_v<T, float> ? kManyBlocks : kFewBlocks)
    pack(const __grid_constant__ PackLaunch call) {
  __shared__ Exchange<T> tile;
  const PackEntry& entry = find_entry(call, blockIdx.x);
  const Box box = tile_box(entry.matrix, blockIdx.x);
  const bool is_open = entry.is_open && call.device_gate.is_open(entry.matrix.index);
  const Averaging<T> average = make_averaging<T>(call);
  if (entry.by_runs) {
    for_each_chunk(box, [&](const Chunk& chunk) {
      T update[kChunk];
      pack_chunk(update, call, entry, box, chunk, average, is_open);
    });
    return;
  }
  double squares;
  if (entry.is_direct) {
    const bool along_rows = lies_along_rows(entry.matrix.views[kMomentum]);
    squares = squares_of_chunks(tile, call.dtypes[kPacked], entry.matrix.squares, box, along_rows,
                                [&](const Chunk& chunk, T(&update)[kChunk]) {
                                  pack_chunk(update, call, entry, box, chunk, average, is_open);
                                });
  } else {
    load_gradients(tile, call, entry, box, is_open);
    if (is_open) {
      average_tile(tile, call, entry, box, average);
      __syncthreads();
    }
    squares = pack_tile(tile, call, entry, box);
  }
  if (call.sums) {
    write_tile_sum(call.sums, squares, entry.matrix, box);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) pack_codes(const __grid_constant__ PackLaunch call) {
  __shared__ Exchange<T> tile;
  const PackEntry& entry = find_entry(call, blockIdx.x);
  const Box box = tile_box(entry.matrix, blockIdx.x);
  const bool is_open = entry.is_open && call.device_gate.is_open(entry.matrix.index);
  load_gradients(tile, call, entry, box, is_open);
  if (is_open) {
    average_codes(tile, entry, box, make_averaging<T>(call));
    __syncthreads();
  }
  const double squares = pack_tile(tile, call, entry, box);
  if (call.sums) {
    write_tile_sum(call.sums, squares, entry.matrix, box);
  }
}

// Square tiles, whose rows are a block each.
void launch_codes(const MomentumPack& call, PackLaunch& parameters) {
  const auto kernel = call.in_double() ? pack_codes<double> : pack_codes<float>;
  launch_all(call, parameters, kernel, [&](PackEntry& entry) {
    entry.by_runs = false;
    entry.scales = call.scales[entry.matrix.index];
    entry.codes_are_aligned = entry.in_chunks[kMomentum] && lies_along_rows(entry.matrix.views[kMomentum]);
  });
}

void launch_pack(const MomentumPack& call, PackLaunch& parameters) {
  if (!call.scales.empty()) {
    return launch_codes(call, parameters);
  }
  launch_all(call, parameters, call.in_double() ? pack<double> : pack<float>, [](PackEntry&) {});
}

}  // namespace

void momentum_pack_cuda(const MomentumPack& call) {
  PackLaunch parameters{};
  std::copy_n(call.dtypes, 3, parameters.dtypes);
  parameters.weight = call.weight;
  parameters.nesterov = call.nesterov;
  parameters.maximize = call.maximize;
  parameters.grad_scale = call.grad_scale.where(kHost).get(0, 1);
  parameters.device_grad_scale = call.grad_scale.where(kDevice);
  parameters.device_gate = call.gate.where(kDevice);
  launch_with_norms(call, parameters, [&] { launch_pack(call, parameters); });
}

}  // namespace optimizer
