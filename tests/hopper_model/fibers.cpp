// Fibers by ucontext, one stack each.
#include "fibers.h"

#include <ucontext.h>

#include <algorithm>
#include <exception>
#include <stdexcept>

namespace hopper_model {

namespace {

constexpr size_t kStackBytes = 64 << 10;
// Of tries to find something that can go on, before all is looked at.
constexpr int kTries = 64;
// Events are rare beside the steps of hundreds of threads, so that most of them stay under way for long.
constexpr uint64_t kStepsToEvent = 256;

ucontext_t scheduler;

}  // namespace

struct Fibers::Fiber {
  std::function<void()> body;
  ucontext_t context{};
  std::vector<char> stack = std::vector<char>(kStackBytes);
  Condition condition;
  bool has_ended = false;
  std::exception_ptr error;

  bool can_go_on() const { return !condition || condition(); }
};

namespace {

// Of all there are, the one that runs.
void* running = nullptr;

}  // namespace

Fibers::Fibers(uint64_t seed) : lot_(seed) {}
Fibers::~Fibers() = default;

void Fibers::enter() {
  auto* const fiber = static_cast<Fiber*>(running);
  try {
    fiber->body();
  } catch (...) {
    fiber->error = std::current_exception();
  }
  fiber->has_ended = true;
  swapcontext(&fiber->context, &scheduler);
}

void Fibers::add(std::function<void()> body) {
  auto fiber = std::make_unique<Fiber>();
  fiber->body = std::move(body);
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.data();
  fiber->context.uc_stack.ss_size = fiber->stack.size();
  makecontext(&fiber->context, &Fibers::enter, 0);
  alive_.push_back(fiber.get());
  fibers_.push_back(std::move(fiber));
}

void Fibers::wait(Condition condition) {
  auto* const fiber = static_cast<Fiber*>(running);
  fiber->condition = std::move(condition);
  swapcontext(&fiber->context, &scheduler);
}

void Fibers::happen() {
  std::swap(events_[lot_() % events_.size()], events_.back());
  const auto event = std::move(events_.back());
  events_.pop_back();
  event();
}

// Lets one fiber go on; returns whether there was one that could.
bool Fibers::step() {
  size_t place = lot_() % alive_.size();
  for (int tries = 0; tries < kTries && !alive_[place]->can_go_on(); ++tries) {
    place = lot_() % alive_.size();
  }
  for (size_t all = 0; all < alive_.size() && !alive_[place]->can_go_on(); ++all) {
    place = (place + 1) % alive_.size();
  }
  if (!alive_[place]->can_go_on()) {
    return false;
  }
  Fiber& fiber = *alive_[place];
  fiber.condition = nullptr;
  running = &fiber;
  swapcontext(&scheduler, &fiber.context);
  running = nullptr;
  if (fiber.error) {
    std::rethrow_exception(fiber.error);
  }
  if (fiber.has_ended) {
    std::swap(alive_[place], alive_.back());
    alive_.pop_back();
  }
  return true;
}

void Fibers::run() {
  while (!alive_.empty()) {
    if (!events_.empty() && lot_() % kStepsToEvent == 0) {
      happen();
    } else if (!step()) {
      if (events_.empty()) {
        throw std::runtime_error("nothing can go on: " + std::to_string(alive_.size()) + " threads wait");
      }
      happen();
    }
  }
  while (!events_.empty()) {
    happen();
  }
}

}  // namespace hopper_model
