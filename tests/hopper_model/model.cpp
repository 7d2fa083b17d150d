// What the machine does.
#include "model.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>

namespace hopper_model {

using optimizer::ScalarType;

static bool all_done(const std::vector<std::shared_ptr<bool>>& events) {
  return std::all_of(events.begin(), events.end(), [](const auto& done) { return *done; });
}

void Block::leave() {
  if (--alive == 0) {
    for (Group& group : groups) {
      for (Buffer& buffer : group.buffers) {
        buffer.fill(0x7f);  // NaN
      }
    }
  }
}

void Machine::copy(float* to, const optimizer::Panels& panels, int matrix, int row, int rows, int tile) const {
  const optimizer::HopperGemm& gemm = world_.call.gemm;
  const auto* const from = reinterpret_cast<const uint16_t*>(panels.data) + matrix * panels.matrix_stride;
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < kTileDepth; ++i) {
      const int64_t at = row + r, k = tile * kTileDepth + i;
      const int64_t place = panels.along_k ? at * panels.run_stride + k : k * panels.run_stride + at;
      to[r * kTileDepth + i] = at < gemm.m && k < gemm.k ? widen(from[place]) : 0;
    }
  }
}

// The tile of A for this block, and this block's half of the tile of B for both.
void Machine::start_copies(const Square& square, int tile) {
  const int stage = state_.stage;
  constexpr int64_t kBytesA = kTileRows * kTileDepth * 2, kBytesHalf = kHalf * kTileDepth * 2;
  memory().stages[stage].full.arrive(kBytesA + kBlocks * kBytesHalf);
  world_.fibers.start([this, square, tile, stage] {
    memory().check_alive();
    const int row = square.row * kSquare + block_ * kTileRows;
    copy(memory().stages[stage].a.data(), world_.call.gemm.a, square.matrix, row, kTileRows, tile);
    memory().stages[stage].full.expect(-kBytesA);
  });
  for (Block& to : cluster_.blocks) {
    world_.fibers.start([this, &to, square, tile, stage] {
      to.check_alive();
      float* const half = to.stages[stage].b.data() + block_ * kHalf * kTileDepth;
      copy(half, world_.call.gemm.b, square.matrix, square.col * kSquare + block_ * kHalf, kHalf, tile);
      to.stages[stage].full.expect(-kBytesHalf);
    });
  }
}

void Machine::load(const Square& square, const Tiles& tiles) {
  for (int tile = tiles.first; tile < tiles.first + tiles.count; ++tile) {
    world_.fibers.wait([this] { return memory().stages[state_.stage].empty.has_passed(state_.phase); });
    start_copies(square, tile);
    state_.advance();
  }
}

void Machine::finish_loads() {
  for (int i = 0; i < kStages && !omits(Omitted::kFinishLoads); ++i) {
    world_.fibers.wait([this] { return memory().stages[state_.stage].empty.has_passed(state_.phase); });
    state_.advance();
  }
}

void Machine::add_product(const Product& product) const {
  for (int row = 0; row < kPartRows; ++row) {
    const float* const a = product.stage->a.data() + (group_ * kPartRows + row) * kTileDepth;
    for (int col = 0; col < kTileCols; ++col) {
      const float* const b = product.stage->b.data() + col * kTileDepth;
      float sum = 0;
      for (int i = 0; i < kTileDepth; ++i) {
        sum += a[i] * b[i];
      }
      (*product.sums)[row * kTileCols + col] += sum;
    }
  }
  *product.done = true;
}

// Adds the product of a stage's tiles at some time until it is done, after those that were started before.
Machine::Done Machine::start_product(const std::shared_ptr<Sums>& sums) {
  const auto done = std::make_shared<bool>(false);
  products_.push_back({&memory().stages[state_.stage], sums, done});
  world_.fibers.start([this, done] {
    for (; !*done; products_.pop_front()) {
      add_product(products_.front());
    }
  });
  return done;
}

void Machine::release(const State& state) {
  for (Block& block : cluster_.blocks) {
    block.check_alive();
    block.stages[state.stage].empty.arrive();
  }
}

// By the first thread of a warp group for all of it, one product in flight.
void Machine::multiply_tiles(int tiles) {
  const auto sums = std::make_shared<Sums>();
  sums->fill(0);
  Done before;
  State read = state_;
  for (int tile = 0; tile < tiles; ++tile) {
    world_.fibers.wait([this] { return memory().stages[state_.stage].full.has_passed(state_.phase); });
    const Done done = start_product(sums);
    if (before) {
      world_.fibers.wait([before] { return *before; });
      release(read);
      read.advance();
    }
    before = done;
    state_.advance();
  }
  world_.fibers.wait([before] { return *before; });
  release(read);
  warp_group().sums.push_back(sums);
}

std::array<float, kSums> Machine::multiply(int tiles) {
  const size_t section = sections_++;
  if (thread_ == 0) {
    multiply_tiles(tiles);
  }
  world_.fibers.wait([this, section] { return warp_group().sums.size() > section; });
  const Sums& all = *warp_group().sums[section];
  std::array<float, kSums> sums;
  for (int i = 0; i < kSums; ++i) {
    sums[i] = all[row_of_sum(thread_, i) * kTileCols + col_of_sum(thread_, i)];
  }
  return sums;
}

void Machine::keep(int64_t place, const FourSums& sums) {
  const Done done = warp_group().kept.emplace_back(std::make_shared<bool>(false));
  world_.fibers.start([done, &last = world_.call.kept.at(place + kTogether - 1), sums] {
    std::memcpy(&last - (kTogether - 1), sums.at, sizeof sums);
    *done = true;
  });
}

FourSums Machine::kept(int64_t place) const {
  FourSums sums;
  std::memcpy(sums.at, &world_.call.kept.at(place), sizeof sums);
  return sums;
}

// Waits for what has been kept before, by whichever thread.
void Machine::count(int part) {
  if (!omits(Omitted::kFence)) {
    world_.fibers.wait([kept = warp_group().kept] { return all_done(kept); });
  }
  warp_group().kept.clear();
  warp_group().arrived = world_.call.arrivals.at(part)++;
}

void Machine::sync() {
  if (!omits(syncs_++ % 2 == 0 ? Omitted::kFirstSync : Omitted::kSecondSync)) {
    wait_for_group();
  }
}

void Machine::wait_for_group() {
  Group& group = warp_group();
  const int round = group.round;
  if (++group.waiting == kGroupThreads) {
    group.waiting = 0;
    ++group.round;
  }
  world_.fibers.wait([&group, round] { return group.round != round; });
}

void Machine::wait_for_reads(Omitted what, size_t most) {
  if (omits(what)) {
    return;
  }
  world_.fibers.wait([this, most] {
    const size_t old = reads_.size() - std::min(reads_.size(), most);
    return std::all_of(reads_.begin(), reads_.begin() + old, [](const Done& done) { return *done; });
  });
}

void Machine::publish() {
  if (omits(Omitted::kPublish)) {
    return;
  }
  for (const Put& put : unpublished_) {
    if (put.place < 0 || put.place + 2 > kPieceBytes) {
      throw std::runtime_error("an element is put outside of its buffer");
    }
    std::memcpy(warp_group().buffers[put.buffer].data() + put.place, &put.value, 2);
  }
  unpublished_.clear();
}

void Machine::store(int buffer, int matrix, int row, int col) {
  const auto done = std::make_shared<bool>(false);
  reads_.push_back(done);
  const Call& call = world_.call;
  Fibers& fibers = world_.fibers;
  const Buffer& from = warp_group().buffers[buffer];
  fibers.start([=, &call, &fibers, &from] {
    *done = true;
    fibers.start([=, &call, piece = from] {
      const optimizer::Panels& c = call.gemm.c;
      auto* const to = reinterpret_cast<uint16_t*>(c.data) + matrix * c.matrix_stride;
      for (int i = 0; i < kPiece * kPiece; ++i) {
        const int at = i / kPiece, along = i % kPiece;
        if (row + at < call.gemm.m && col + along < call.gemm.m) {
          const int chunk = (along / 8) ^ (at % 8);  // the swizzle of 128 bytes, as TMA's
          const char* const element = piece.data() + at * 128 + chunk * 16 + along % 8 * 2;
          std::memcpy(to + (row + at) * c.run_stride + col + along, element, 2);
        }
      }
    });
  });
}

uint32_t Machine::round(float low, float high) const {
  const auto bits = [&](float x) -> uint32_t {
    return world_.call.gemm.dtype == ScalarType::Half ? c10::Half(x).x : c10::BFloat16(x).x;
  };
  return bits(low) | bits(high) << 16;
}

float Machine::widen(uint16_t bits) const {
  return world_.call.gemm.dtype == ScalarType::Half
             ? static_cast<float>(c10::Half(bits, c10::Half::from_bits()))
             : static_cast<float>(c10::BFloat16(bits, c10::BFloat16::from_bits()));
}

}  // namespace hopper_model
