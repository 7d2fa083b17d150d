// What a device of compute capability 9.0 does for optimizer_cuda/hopper, on the CPU: a `Machine` for roles.h.
//
// The package's own code runs here as it is: which squares, what each role does, how a result is written. CUTLASS's main
// loop cannot be compiled for a CPU. In its place stands what its interface promises: a ring of stages with a barrier
// for full and one for empty, each with a phase; copies of tiles that arrive at a random later time, half of B's in both
// blocks of the cluster; products that read their stage at a random later time until they are waited for. Stores read
// shared memory, and write the result, at random later times. What a thread puts into shared memory is seen by stores
// only once it has been published. What it keeps for other clusters reaches memory at a random time, at the latest when
// its warp group is counted as arrived. A block's memory is lost when all its threads have ended.
//
// That the instructions behind these words do what they promise is not shown here.
#pragma once

#include "../../optimizer_cuda/hopper/roles.h"
#include "fibers.h"

#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <stdexcept>

namespace hopper_model {

using namespace optimizer::hopper;

constexpr int kStages = 3;
constexpr int kBlocks = kSquare / kTileRows;
constexpr int kHalf = kTileCols / kBlocks;

// What a test leaves out, to see that it is needed.
enum class Omitted { kNothing, kWaitForBuffer, kFirstSync, kSecondSync, kPublish, kFinishStores, kFinishLoads, kFence };

// How a call is run: by so many clusters, of which so many run at one time.
struct Way {
  int clusters, together;
  uint64_t seed;
  Omitted omitted;
};

struct Call {
  const optimizer::HopperGemm& gemm;
  Sections sections;
  Result result;
  Omitted omitted;
  std::vector<float> kept;
  std::vector<int> arrivals;
};

// Counts arrivals and bytes; its phase turns over when both are complete.
struct Barrier {
  int arrivals, missing, phase = 0;
  int64_t bytes = 0;

  explicit Barrier(int count) : arrivals(count), missing(count) {}
  void arrive(int64_t expected = 0) {
    --missing;
    expect(expected);
  }
  void expect(int64_t more) {
    bytes += more;
    if (missing == 0 && bytes == 0) {
      missing = arrivals;
      phase ^= 1;
    }
  }
  bool has_passed(int parity) const { return phase != parity; }
};

struct Stage {
  std::array<float, kTileRows * kTileDepth> a;
  std::array<float, kTileCols * kTileDepth> b;
  Barrier full{1};
  Barrier empty{kBlocks * kGroups};
};

using Sums = std::array<float, kPartRows * kTileCols>;
using Buffer = std::array<char, kPieceBytes>;

// A warp group that multiplies.
struct Group {
  std::vector<std::shared_ptr<Sums>> sums;  // of each section so far
  std::array<Buffer, kBuffers> buffers;
  int waiting = 0, round = 0;  // at its barrier
  std::vector<std::shared_ptr<bool>> kept;  // whether sums are in memory
  int arrived = 0;
};

struct Block {
  std::array<Stage, kStages> stages;
  std::array<Group, kGroups> groups;
  int alive = 0;

  void check_alive() const {
    if (alive == 0) {
      throw std::runtime_error("a block's memory is touched after its end");
    }
  }
  // A thread of it has come to its end.
  void leave();
};

struct State {
  int stage = 0, phase = 0;

  void advance() {
    stage = (stage + 1) % kStages;
    phase ^= stage == 0;
  }
};

// What all threads of a cluster share.
struct Cluster {
  int number;
  std::array<Block, kBlocks> blocks;
};

// The clusters that run at one time.
struct World {
  Call& call;
  int clusters;  // of the whole call
  Fibers fibers;
  std::deque<Cluster> together;
};

class Machine {
 public:
  Machine(World& world, Cluster& cluster, int block, int group, int thread, State state)
      : world_(world), cluster_(cluster), block_(block), group_(group), thread_(thread), state_(state) {}

  int cluster() const { return cluster_.number; }
  int clusters() const { return world_.clusters; }
  int block() const { return block_; }
  int group() const { return group_; }
  int thread() const { return thread_; }
  bool issues() const { return thread_ == 0; }

  int tiles_along_k() const { return tiles_along(world_.call.gemm.k); }
  void load(const Square& square, const Tiles& tiles);
  void finish_loads();
  std::array<float, kSums> multiply(int tiles);
  void keep(int64_t place, const FourSums& sums);
  FourSums kept(int64_t place) const;
  void count(int part);
  int arrived() { return warp_group().arrived; }

  void sync();
  void wait_for_buffer() { wait_for_reads(Omitted::kWaitForBuffer, kBuffers - 1); }
  void finish_stores() { wait_for_reads(Omitted::kFinishStores, 0); }
  void publish();
  void store(int buffer, int matrix, int row, int col);
  uint32_t round(float low, float high) const;
  float widen(uint32_t pair, int i) const { return widen(static_cast<uint16_t>(pair >> i * 16)); }

  void put(int buffer, int place, uint16_t value) { unpublished_.push_back({buffer, place, value}); }

  // Each thread puts its own elements where the thread that tells the address of their row puts them.
  template <bool transposed, class Place>
  void put_matrices(int buffer, const Place& place, const uint32_t (&values)[4]) {
    const int lane = thread_ % 32;
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int i = 0; i < 2; ++i) {
        const int row = lane / 4, col = lane % 4 * 2 + i;
        const int at = transposed ? place(matrix, col) + row * 2 : place(matrix, row) + col * 2;
        put(buffer, at, static_cast<uint16_t>(values[matrix] >> i * 16));
      }
    }
  }

 private:
  struct Put {
    int buffer, place;
    uint16_t value;
  };
  using Done = std::shared_ptr<bool>;
  struct Product {
    const Stage* stage;
    std::shared_ptr<Sums> sums;
    Done done;
  };

  float widen(uint16_t bits) const;
  bool omits(Omitted what) const { return world_.call.omitted == what; }
  Block& memory() { return cluster_.blocks[block_]; }
  Group& warp_group() { return memory().groups[group_]; }
  void wait_for_group();
  void wait_for_reads(Omitted what, size_t most);
  void copy(float* to, const optimizer::Panels& panels, int matrix, int row, int rows, int tile) const;
  void start_copies(const Square& square, int tile);
  void add_product(const Product& product) const;
  Done start_product(const std::shared_ptr<Sums>& sums);
  void release(const State& state);
  void multiply_tiles(int tiles);

  World& world_;
  Cluster& cluster_;
  int block_, group_, thread_;
  State state_;
  int syncs_ = 0;
  size_t sections_ = 0;
  std::vector<Put> unpublished_;
  std::vector<Done> reads_;
  std::deque<Product> products_;
};

// Runs the whole call; throws std::runtime_error where it can see that something is wrong.
void run(const optimizer::HopperGemm& gemm, const Way& way);

}  // namespace hopper_model
