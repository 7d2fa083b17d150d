// Threads of this library, beside those of torch: a region of torch's ends when each of its threads has been there, also
// those that had nothing to do. Where other processes hold the cores, that is a time slice later. Here a thread that
// comes too late is not waited for.
#include "threads.h"

#include <torch/csrc/stable/ops.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

namespace optimizer {
namespace {

using Work = std::function<void(int64_t)>;

// How long a thread looks for work, or for the end of others' work, before it sleeps: longer than Python needs from one
// call to the next, shorter than a time slice.
constexpr std::chrono::microseconds kPatience{100};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `done()` came true in time.
template <class Done>
bool watch(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) {
        return true;
      }
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

// Not the standard library's, which needs a newer one than the systems that the package promises have.
class Condition {
 public:
  void wait(std::unique_lock<std::mutex>& lock) { pthread_cond_wait(&condition_, lock.mutex()->native_handle()); }
  void wake_all() { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

// The processors that a thread may use: settings of OpenMP may bind the caller's to one of them.
#if defined(__linux__)
using Processors = cpu_set_t;

Processors processors() {
  Processors mine;
  sched_getaffinity(0, sizeof(mine), &mine);
  return mine;
}

void use(const Processors& these) {
  sched_setaffinity(0, sizeof(these), &these);
}
#else
struct Processors {};

Processors processors() {
  return {};
}

void use(const Processors&) {}
#endif

class Crew {
 public:
  void run(int64_t threads, const Work& work) {
    if (threads < 2 || running_.exchange(true)) {  // another thread of the program has the crew
      return work(0);
    }
    grow(threads - 1);
    open(threads - 1, work);
    take_part(work, 0);
    close();
    const std::exception_ptr problem = std::exchange(problem_, nullptr);
    running_ = false;
    if (problem) {
      std::rethrow_exception(problem);
    }
  }

 private:
  // Each new member may use what torch's thread of its number may.
  void grow(int64_t members) {
    if (members <= members_) {
      return;
    }
    std::vector<Processors> places(members + 1, processors());
    torch::stable::parallel_for(0, members + 1, 1, [&](int64_t begin, int64_t end) {
      std::fill(places.begin() + begin, places.begin() + end, processors());
    });
    for (; members_ < members; ++members_) {
      std::thread([this, place = places[members_ + 1]] {
        use(place);
        serve();
      }).detach();
    }
  }

  // What it throws, the caller will, when nobody is at work any more.
  void take_part(const Work& work, int64_t number) {
    try {
      work(number);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      problem_ = std::current_exception();
    }
  }

  void open(int64_t vacant, const Work& work) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      vacant_ = vacant;
    }
    calls_.wake_all();
  }

  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      vacant_ = 0;
    }
    const auto all_out = [&] { return inside_ == 0; };
    if (!watch(all_out)) {
      std::unique_lock<std::mutex> lock(mutex_);
      while (!all_out()) {
        ends_.wait(lock);
      }
    }
  }

  void serve() {
    for (;;) {
      watch([&] { return vacant_ > 0; });
      std::unique_lock<std::mutex> lock(mutex_);
      while (vacant_ == 0) {
        calls_.wait(lock);
      }
      const int64_t number = vacant_--;
      ++inside_;
      const Work& work = *work_;
      lock.unlock();
      take_part(work, number);
      lock.lock();
      if (--inside_ == 0) {
        ends_.wake_all();
      }
    }
  }

  std::atomic<bool> running_{false};
  std::mutex mutex_;
  Condition calls_, ends_;
  int64_t members_ = 0;
  const Work* work_ = nullptr;
  std::exception_ptr problem_;
  std::atomic<int64_t> vacant_{0}, inside_{0};  // written under the mutex
};

// Never deleted, since its members outlive everything. They do not live on in a forked process, which gets a new one.
Crew*& crew() {
  static Crew* all = [] {
    pthread_atfork(nullptr, nullptr, [] { crew() = new Crew; });
    return new Crew;
  }();
  return all;
}

}  // namespace

int64_t most_threads() {
  return torch::stable::get_num_threads();
}

void with_others(int64_t threads, const Work& work) {
  crew()->run(threads, work);
}

}  // namespace optimizer
