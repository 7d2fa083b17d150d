// The kernel on a device of compute capability 9.0: CUTLASS's main loop, and a `Machine` for result.h and roles.h.
//
// A block has a warp group that loads and two that multiply. The main loop, CUTLASS's collective for sm_90, brings tiles
// of both operands by TMA into a ring of stages and multiplies them from there (wgmma, 64 x 256 x 16); the tile of B is
// the same for both blocks of a cluster, and each loads half of it for both. Sums run in float32 from k = 0 up.
#pragma once

#include "roles.h"

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/numeric_conversion.h>
#include <cutlass/pipeline/pipeline.hpp>

namespace optimizer::hopper {

using namespace cute;

// 4 stages of 48 KiB and 32 KiB for results leave 3 KiB of the 227 that a block has.
constexpr int kStages = 4;
constexpr int kThreads = (1 + kGroups) * kGroupThreads;
// Of 168 registers a thread: those that load need few, and leave the others room for 128 sums.
constexpr int kLoadRegisters = 40, kMultiplyRegisters = 232;

using TileShape = Shape<Int<kTileRows>, Int<kTileCols>, Int<kTileDepth>>;
using Cluster = Shape<Int<kSquare / kTileRows>, _1, _1>;

// The main loop for A (m, k) and B (k, n) with rows or columns as runs of memory.
template <class Element, class LayoutA, class LayoutB>
using MainloopFor = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, 16 / sizeof(Element), Element, LayoutB,
    16 / sizeof(Element), float, TileShape, Cluster, cutlass::gemm::collective::StageCount<kStages>,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;

// Whether the main loop leaves sums where result.h says. Each bit of a thread's and of a sum's number moves the place by
// as much whatever the others are, by shapes that are powers of two, so that the places of single bits tell all.
template <class Product>
constexpr bool sums_stand_as_told() {
  const auto places = Product{}.get_layoutC_TV();  // (thread, sum) -> row + kTileRows column
  const auto told = [](int thread, int i) {
    const int in_group = thread % kGroupThreads, row = thread / kGroupThreads * kPartRows + row_of_sum(in_group, i);
    return row + kTileRows * col_of_sum(in_group, i);
  };
  bool right = true;
  for (int thread = 1; thread < kGroups * kGroupThreads; thread *= 2) {
    right = right && static_cast<int>(places(thread, 0)) == told(thread, 0);
  }
  for (int i = 1; i < kSums; i *= 2) {
    right = right && static_cast<int>(places(0, i)) == told(0, i);
  }
  return right;
}

// Whether TMA swizzles as result.h says.
constexpr bool swizzles_as_told() {
  for (int i = 0; i < kPieceBytes; i += 2) {
    if (Swizzle<3, 4, 3>::apply(i) != place_of_element(i / (kPiece * 2), i / 2 % kPiece)) {
      return false;
    }
  }
  return true;
}
static_assert(swizzles_as_told());

template <class Mainloop>
struct Parameters {
  typename Mainloop::Params mainloop;
  CUtensorMap target;  // of C, in pieces
  Sections sections;
  float* kept;    // sums of sections; null where no square is cut
  int* arrivals;  // at each part of a square that is cut; zero at the start
  Result result;
  int matrices, k;
};

template <class Mainloop>
struct Shared {
  alignas(1024) typename Mainloop::TensorStorage tiles;
  alignas(1024) char buffers[kGroups][kBuffers][kPieceBytes];
  alignas(16) typename Mainloop::PipelineStorage pipeline;
  int arrived[kGroups];
};

constexpr int kMostShared = 227 << 10;  // of a block

template <class Mainloop>
struct Device {
  using Element = typename Mainloop::ElementA;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using Pair = cutlass::Array<Element, 2>;

  static_assert(sizeof(Shared<Mainloop>) <= kMostShared);

  const Parameters<Mainloop>& call;
  Shared<Mainloop>& shared;
  Pipeline pipeline;
  typename Mainloop::PipelineState state;
  int warp_group = 0;
  Mainloop mainloop{};

  __device__ int cluster() const { return blockIdx.x / size(Cluster{}); }
  __device__ int clusters() const { return gridDim.x / size(Cluster{}); }
  __device__ int block() const { return cute::block_rank_in_cluster(); }
  __device__ int group() const { return warp_group - 1; }
  __device__ int thread() const { return threadIdx.x % kGroupThreads; }
  __device__ int tiles_along_k() const { return tiles_along(call.k); }

  __device__ void load(const Square& square, const Tiles& tiles) {
    const auto sizes = make_shape(call.result.m, call.result.m, call.k, call.matrices);
    const auto inputs = mainloop.load_init(sizes, call.mainloop);
    const auto place = make_coord(square.row * size<0>(Cluster{}) + block(), square.col, _, square.matrix);
    const auto along_k = shape<3>(get<0>(inputs));
    const auto first = make_coord_iterator(idx2crd(tiles.first, along_k), along_k);
    mainloop.load(call.mainloop, pipeline, state, inputs, place, first, tiles.count, threadIdx.x, block(),
                  shared.tiles);
    state.advance(tiles.count);
  }

  __device__ void finish_loads() { mainloop.load_tail(pipeline, state); }

  __device__ auto multiply(int tiles) {
    typename Mainloop::TiledMma product;
    auto sums = partition_fragment_C(product, take<0, 2>(TileShape{}));
    static_assert(decltype(size(sums))::value == kSums && sums_stand_as_told<typename Mainloop::TiledMma>());
    mainloop.mma(pipeline, state, sums, tiles, group() * kGroupThreads + thread(), shared.tiles, call.mainloop);
    mainloop.mma_tail(pipeline, state, tiles);
    state.advance(tiles);
    return sums;
  }

  __device__ void keep(int64_t place, const FourSums& sums) const {
    *reinterpret_cast<FourSums*>(call.kept + place) = sums;
  }
  __device__ FourSums kept(int64_t place) const { return *reinterpret_cast<const FourSums*>(call.kept + place); }

  // One thread's fences suffice: barriers order the accesses of the others before and after them.
  __device__ void count(int part) {
    __threadfence();
    shared.arrived[group()] = atomicAdd(call.arrivals + part, 1);
    __threadfence();
  }
  __device__ int arrived() const { return shared.arrived[group()]; }

  __device__ bool issues() const { return thread() == 0; }
  __device__ void sync() const { cutlass::arch::NamedBarrier::sync(kGroupThreads, group()); }
  __device__ void publish() const { tma_store_fence(); }
  __device__ void wait_for_buffer() const { tma_store_wait<kBuffers - 1>(); }
  __device__ void finish_stores() const { tma_store_wait<0>(); }

  __device__ void store(int buffer, int matrix, int row, int col) const {
    SM90_TMA_STORE_3D::copy(&call.target, shared.buffers[group()][buffer], col, row, matrix);
    tma_store_arrive();
  }

  template <bool transposed, class Place>
  __device__ void put_matrices(int buffer, const Place& place, const uint32_t (&v)[4]) const {
    const int lane = threadIdx.x % 32;
    auto& to = *reinterpret_cast<uint128_t*>(shared.buffers[group()][buffer] + place(lane / 8, lane % 8));
    using Store = std::conditional_t<transposed, SM90_U16x8_STSM_T, SM90_U32x4_STSM_N>;
    Store::copy(v[0], v[1], v[2], v[3], to);
  }

  __device__ void put(int buffer, int place, uint16_t value) const {
    *reinterpret_cast<uint16_t*>(shared.buffers[group()][buffer] + place) = value;
  }

  __device__ uint32_t round(float low, float high) const {
    const Pair pair = cutlass::NumericArrayConverter<Element, float, 2>::convert({low, high});
    return reinterpret_cast<const uint32_t&>(pair);
  }
  __device__ float widen(uint32_t pair, int i) const {
    return static_cast<float>(reinterpret_cast<const Pair&>(pair)[i]);
  }
};

template <class Mainloop>
__device__ typename Mainloop::PipelineParams pipeline_of(const Parameters<Mainloop>& call, bool loads, bool multiplies) {
  using Role = typename Mainloop::MainloopPipeline::ThreadCategory;
  typename Mainloop::PipelineParams params;
  params.role = loads ? Role::Producer : multiplies ? Role::Consumer : Role::NonParticipant;
  params.is_leader = threadIdx.x % kGroupThreads == 0;
  params.num_consumers = kGroups * kGroupThreads;
  params.num_producers = Mainloop::NumProducerThreadEvents;
  params.transaction_bytes = call.mainloop.tma_transaction_bytes;
  return params;
}

template <class Mainloop>
__global__ void __launch_bounds__(kThreads, 1)
    symmetric_kernel(const __grid_constant__ Parameters<Mainloop> call) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Mainloop>*>(memory);
  const int warp = cutlass::canonical_warp_idx_sync();
  const bool multiplies = warp >= kGroupThreads / 32, loads = warp == 0;
  if (loads && elect_one_sync()) {
    Mainloop::prefetch_tma_descriptors(call.mainloop);
    prefetch_tma_descriptor(&call.target);
  }
  using Pipeline = typename Mainloop::MainloopPipeline;
  Pipeline pipeline(shared.pipeline, pipeline_of(call, loads, multiplies), Cluster{});
  // No block writes to another's barriers before they are set up.
  cluster_arrive_relaxed();
  cluster_wait();
  if (multiplies) {
    cutlass::arch::warpgroup_reg_alloc<kMultiplyRegisters>();
    // The same number in all lanes, and known to be.
    Device<Mainloop> machine{call, shared, pipeline, {}, cutlass::canonical_warp_group_idx()};
    multiply_sections(machine, call.sections, call.result);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kLoadRegisters>();
    if (loads) {
      Device<Mainloop> machine{call, shared, pipeline, cutlass::make_producer_start_state<Pipeline>()};
      load_sections(machine, call.sections);
    }
  }
#endif
}

}  // namespace optimizer::hopper
