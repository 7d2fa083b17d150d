// move_blocks_ on the GPU: one thread block per tile, up to kBlocks blocks in one launch.
//
// The checked arguments are in move_blocks.h; tiles.cuh launches kernels. Tiles whose rows are runs of memory are moved
// in chunks that start where the target can take them in one access, the others through shared memory.
#include "../optimizer_common/move_blocks.h"
#include "exchange.cuh"

namespace optimizer {
namespace {

constexpr int kBlocks = 640;

struct MoveLaunch {
  MovedBlock blocks[kBlocks];
  int count;
  int64_t first_tile;
  MovedTensors tensors;
};
static_assert(sizeof(MoveLaunch) <= kMostParameterBytes);

template <class T>
__device__ T* place(const View& view, int64_t row, int64_t col) {
  return reinterpret_cast<T*>(view.data) + row * view.row_stride + col * view.col_stride;
}

__device__ bool takes_whole_access(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kAccess == 0;
}

// Moves `count` elements, at most kAccess bytes. If it is exactly kAccess bytes, `to` must be aligned to them.
template <class T>
__device__ void move_chunk(T* to, const T* from, int count) {
  constexpr int kElements = kAccess / sizeof(T);
  if (count == kElements && takes_whole_access(from)) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  } else if (count == kElements) {
    alignas(kAccess) T chunk[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      chunk[i] = from[i];
    }
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(chunk);
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i < count) {
        to[i] = from[i];
      }
    }
  }
}

// Where a row begins in a message depends on the sizes of everything before it, flags too, so rows are rarely aligned.
// The first chunk of each row is shortened, so that all later ones start where the widest access does.
template <class T>
__device__ void move_runs(const Matrix<2>& m, const Box& box) {
  constexpr int kElements = kAccess / sizeof(T);
  const int cols = box.cols, per_row = ceil_div(cols + kElements - 1, kElements);
  for (int k = threadIdx.x; k < box.rows * per_row; k += kThreads) {
    const int row = box.row + k / per_row;
    T* to = place<T>(m.views[kTarget], row, box.col);
    const T* from = place<T>(m.views[kSource], row, box.col);
    const int lead = reinterpret_cast<uintptr_t>(to) % kAccess / sizeof(T);
    const int end = (k % per_row + 1) * kElements - lead, begin = max(end - kElements, 0);
    move_chunk(to + begin, from + begin, min(end, cols) - begin);
  }
}

template <class T>
__device__ void move_elements(const Matrix<2>& m, const Box& box) {
  __shared__ Exchange<T> tile;
  for_each_place<kPlaces>(box, m.views[kSource], [&](int row, int col, int) {
    tile[row][col] = *place<T>(m.views[kSource], box.row + row, box.col + col);
  });
  __syncthreads();
  for_each_place<kPlaces>(box, m.views[kTarget], [&](int row, int col, int) {
    *place<T>(m.views[kTarget], box.row + row, box.col + col) = tile[row][col];
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ MoveLaunch call) {
  const int64_t tile = call.first_tile + blockIdx.x;
  const int block = last_start(call.count, tile, [&](int i) { return call.blocks[i].first_tile; });
  const Matrix<2> m = matrix_of_tile(call.tensors, call.blocks[block], tile);
  const Box box = tile_box(m, tile);
  if (rows_are_runs(m)) {
    move_runs<T>(m, box);
  } else {
    move_elements<T>(m, box);
  }
}

auto kernel_for(int64_t element_size) {
  return element_size == 2 ? move_kernel<uint16_t> : element_size == 4 ? move_kernel<uint32_t> : move_kernel<uint64_t>;
}

}  // namespace

void move_blocks_cuda(const MoveBlocks& call) {
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  const int64_t blocks = call.blocks.size();
  MoveLaunch parameters{.tensors = call.tensors};
  for (int64_t first = 0; first < blocks; first += kBlocks) {
    parameters.count = std::min<int64_t>(kBlocks, blocks - first);
    std::copy_n(call.blocks.begin() + first, parameters.count, parameters.blocks);
    parameters.first_tile = parameters.blocks[0].first_tile;
    const int64_t next = first + parameters.count;
    const int64_t end = next < blocks ? call.blocks[next].first_tile : call.tiles;
    launch(kernel_for(call.tensors.element_size), parameters, end - parameters.first_tile, call.device);
  }
}

}  // namespace optimizer
