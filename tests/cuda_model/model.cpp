// Blocks, threads and barriers.
#undef _FORTIFY_SOURCE  // which takes a jump to another stack for a mistake
#include "model.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

namespace cuda_model {

Index block_index, thread_index;

namespace {

constexpr int kMostThreads = 1024;
constexpr int64_t kMostBlocks = 0x7fffffff;
constexpr size_t kMostParameterBytes = 32764;
constexpr size_t kStackBytes = 64 << 10;

enum class State { kRuns, kWaits, kEnded };

struct Place {
  const char* file = nullptr;
  int line = 0;

  bool operator==(const Place& other) const { return file == other.file && line == other.line; }
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};

// Its context is for the start alone: from there on jumps do, which leave the mask of signals as it is and cost little.
struct Fiber {
  ucontext_t context;
  jmp_buf stopped;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  State state = State::kRuns;
  bool has_started = false;
  Place barrier;
};

jmp_buf scheduler;
std::vector<Fiber> fibers;  // kept from block to block: each runs one body after another
Fiber* current = nullptr;
const std::function<void()>* current_body = nullptr;
const Grid* current_grid = nullptr;
std::string failure;
std::mt19937_64 random_order;

void yield(State state) {
  current->state = state;
  if (_setjmp(current->stopped) == 0) {
    _longjmp(scheduler, 1);
  }
}

void run_bodies() {
  for (;;) {
    (*current_body)();
    yield(State::kEnded);
  }
}

void make_fibers(int threads) {
  if (static_cast<int>(fibers.size()) == threads) {
    return;
  }
  fibers = std::vector<Fiber>(threads);
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_bodies, 0);
  }
}

std::string here() {
  return "block " + std::to_string(block_index.x) + ", thread " + std::to_string(thread_index.x);
}

// Fibers that have not come to their end cannot be used again.
[[noreturn]] void end_launch(std::string text) {
  fibers.clear();
  failure.clear();
  throw std::runtime_error("in the model of CUDA: " + text);
}

void go_on() {
  if (current->has_started) {
    _longjmp(current->stopped, 1);
  }
  current->has_started = true;
  setcontext(&current->context);
}

void resume(int thread) {
  thread_index.x = thread;
  current = &fibers[thread];
  current->state = State::kRuns;
  if (_setjmp(scheduler) == 0) {
    go_on();
  }
  current = nullptr;
  if (!failure.empty()) {
    end_launch(failure);
  }
}

// Whether the threads, which have all stopped, wait at one barrier; if not, they must have ended.
bool wait_at_one_barrier() {
  const auto first = std::find_if(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.state == State::kWaits; });
  if (first == fibers.end()) {
    return false;
  }
  const auto waits_there = [&](const Fiber& f) { return f.state == State::kWaits && f.barrier == first->barrier; };
  const size_t together = std::count_if(fibers.begin(), fibers.end(), waits_there);
  if (together < fibers.size()) {
    end_launch("divergent barrier: of " + std::to_string(fibers.size()) + " threads of block " +
               std::to_string(block_index.x) + " only " + std::to_string(together) + " wait at " +
               first->barrier.text());
  }
  return true;
}

void run_block(std::vector<int>& order) {
  poison_shared();
  do {
    std::shuffle(order.begin(), order.end(), random_order);
    std::for_each(order.begin(), order.end(), resume);
  } while (wait_at_one_barrier());
}

void check(const Grid& grid) {
  const bool fits = grid.blocks > 0 && grid.blocks <= kMostBlocks && grid.threads > 0 && grid.threads <= kMostThreads &&
                    grid.parameter_bytes <= kMostParameterBytes;
  if (!fits) {
    end_launch("no GPU takes a launch of " + std::to_string(grid.blocks) + " blocks of " +
               std::to_string(grid.threads) + " threads with " + std::to_string(grid.parameter_bytes) +
               " bytes of parameters");
  }
  if (grid.stream != current_stream()) {
    end_launch("a launch on another stream than torch's current one");
  }
}

bool lies_in(uintptr_t address, const void* begin, size_t bytes) {
  return address - reinterpret_cast<uintptr_t>(begin) < bytes;
}

template <class Number>
std::vector<Number> count_up(int64_t size) {
  std::vector<Number> numbers(size);
  std::iota(numbers.begin(), numbers.end(), Number{0});
  return numbers;
}

}  // namespace

void run(const Grid& grid, const std::function<void()>& body) {
  check(grid);
  make_fibers(grid.threads);
  find_shared();
  current_body = &body;
  current_grid = &grid;
  std::vector<int64_t> blocks = count_up<int64_t>(grid.blocks);
  std::vector<int> threads = count_up<int>(grid.threads);
  std::shuffle(blocks.begin(), blocks.end(), random_order);
  for (const int64_t block : blocks) {
    block_index.x = static_cast<unsigned>(block);
    run_block(threads);
  }
}

void* current_stream() {
  static char stream;
  return &stream;
}

void barrier(const char* file, int line) {
  current->barrier = {file, line};
  yield(State::kWaits);
}

void seed(uint64_t number) {
  random_order.seed(number);
}

bool in_kernel() {
  return current != nullptr;
}

bool is_on_stack(uintptr_t address) {
  return lies_in(address, current->stack.data(), current->stack.size());
}

bool is_parameter(uintptr_t address) {
  return lies_in(address, current_grid->parameters, current_grid->parameter_bytes);
}

void fail(const std::string& text) {
  failure = here() + " " + text;
  _longjmp(scheduler, 1);
}

}  // namespace cuda_model
