// Threads that run in random order, and events that happen at random times between their steps.
//
// A thread is a fiber; it runs until it waits for a condition. Whatever may run next, a thread whose condition holds or
// an event that has been started, is drawn by lot: code that needs another order than its waits enforce gives other
// results here from one seed to the next.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace hopper_model {

using Condition = std::function<bool()>;

class Fibers {
 public:
  explicit Fibers(uint64_t seed);
  ~Fibers();

  void add(std::function<void()> body);
  // Something that happens at a random time from now on, as does what it starts.
  void start(std::function<void()> event) { events_.push_back(std::move(event)); }
  // Of the calling fiber.
  void wait(Condition condition);
  // Runs until all fibers have ended and all that was started has happened; throws what one of them throws, and
  // std::runtime_error where none can go on.
  void run();

 private:
  struct Fiber;
  static void enter();
  bool step();
  void happen();

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> alive_;
  std::vector<std::function<void()>> events_;
  std::mt19937_64 lot_;
};

}  // namespace hopper_model
