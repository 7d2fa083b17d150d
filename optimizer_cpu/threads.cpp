// Threads of this library, beside those of torch: a region of torch's ends when each of its threads has been there, also
// those that had nothing to do. Where other processes hold the cores, that is a time slice later. Here a thread that
// comes too late is not waited for.
#include "threads.h"

#include <torch/csrc/stable/ops.h>

#include <cfenv>
#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
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

  void wake(int64_t count) {
    for (; count > 0; --count) {
      pthread_cond_signal(&condition_);
    }
  }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

// The processors that a thread may use: settings of OpenMP may bind the caller's to one of them. Not known where there
// are more than a set holds.
#if defined(__linux__)
using Processors = std::optional<cpu_set_t>;

Processors processors() {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  return sched_getaffinity(0, sizeof(mine), &mine) == 0 ? Processors(mine) : std::nullopt;
}

void use(const Processors& these) {
  if (these) {
    sched_setaffinity(0, sizeof(*these), &*these);
  }
}
#else
struct Processors {};

Processors processors() {
  return {};
}

void use(const Processors&) {}
#endif

// How a thread rounds and whether it takes small numbers for zero: settings of each thread.
#if defined(__x86_64__)
using Arithmetic = unsigned;

Arithmetic arithmetic() {
  return _mm_getcsr();
}

void use(Arithmetic this_one) {
  _mm_setcsr(this_one);
}
#else
using Arithmetic = std::fenv_t;

Arithmetic arithmetic() {
  Arithmetic mine;
  std::fegetenv(&mine);
  return mine;
}

void use(const Arithmetic& this_one) {
  std::fesetenv(&this_one);
}
#endif

// The threads that torch has in a process are not in those that are forked from it: there no region of torch's ends.
std::atomic<bool> forked{false};

class Crew {
 public:
  void run(int64_t threads, const Work& work) {
    if (threads < 2 || running_.exchange(true)) {  // another thread of the program has the crew
      return work(0);
    }
    try {
      grow(threads - 1);
    } catch (...) {  // the system has no more threads to give: those that are here do
    }
    open(std::min(threads - 1, members_), work);
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
    if (!forked) {
      torch::stable::parallel_for(0, members + 1, 1, [&](int64_t begin, int64_t end) {
        std::fill(places.begin() + begin, places.begin() + end, processors());
      });
    }
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
      arithmetic_ = arithmetic();
      vacant_ = vacant;
    }
    calls_.wake(vacant);  // not all, of which a call may need few
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
      const Arithmetic of_caller = arithmetic_;
      lock.unlock();
      use(of_caller);
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
  Arithmetic arithmetic_{};  // the caller's, with which all of them work
  std::exception_ptr problem_;
  std::atomic<int64_t> vacant_{0}, inside_{0};  // written under the mutex
};

// Never deleted, since its members outlive everything. They do not live on in a forked process, which gets a new one.
Crew*& crew() {
  static Crew* all = [] {
    pthread_atfork(nullptr, nullptr, [] {
      forked = true;
      crew() = new Crew;
    });
    return new Crew;
  }();
  return all;
}

// When the library is loaded: the first call may come in a forked process.
[[maybe_unused]] Crew* const before_any_fork = crew();

}  // namespace

int64_t most_threads() {
  return torch::stable::get_num_threads();
}

void with_others(int64_t threads, const Work& work) {
  crew()->run(threads, work);
}

}  // namespace optimizer
