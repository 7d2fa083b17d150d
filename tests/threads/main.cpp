// Prints, for each of several calls in which one of two threads throws, whether both took part, whether the caller got
// the exception, and whether the other thread had done its work by then. Compiled with the library's threads, it stands
// in for the functions of torch that they call. Then whether a call beside another one returns before that one does.
// Last, of calls for several threads, whether so many took part and no more, and whether each had a number of its own.
#include "../../optimizer_cpu/threads.cpp"

#include <cstdio>
#include <stdexcept>

using namespace optimizer;
using std::chrono::steady_clock;

extern "C" AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc work, void* context) {
  work(begin, end, context);
  return 0;
}

extern "C" AOTITorchError torch_get_num_threads(uint32_t* threads) {
  *threads = 2;
  return 0;
}

// Torch 2.15's header asks for it where it throws, which nothing does here.
extern "C" uint64_t aoti_torch_abi_version() {
  return 0;
}

template <class Done>
void wait_for(const Done& done) {
  for (const auto end = steady_clock::now() + std::chrono::seconds(10); !done() && steady_clock::now() < end;) {
    std::this_thread::yield();
  }
}

int main() {
  for (const int64_t thrower : {1, 0, 1, 0}) {
    std::atomic<int> here{0}, done{0};
    bool caught = false;
    try {
      with_others(2, [&](int64_t thread) {
        ++here;
        wait_for([&] { return here == 2; });
        if (thread == thrower) {
          throw std::runtime_error("thrown");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        ++done;
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    std::printf("%d%d%d ", here == 2, caught, done == 1);
  }
  std::atomic<int> here{0}, returned{0};
  std::thread other;
  bool in_time[2] = {};
  with_others(2, [&](int64_t thread) {
    ++here;
    wait_for([&] { return here == 2; });
    if (thread == 0) {
      other = std::thread([&] {
        with_others(2, [](int64_t) {});
        ++returned;
      });
    }
    wait_for([&] { return returned == 1; });
    in_time[thread] = returned == 1;
  });
  other.join();
  std::printf("%d%d ", in_time[0], in_time[1]);
  for (const int64_t threads : {4, 3}) {
    std::atomic<int> together{0}, numbers{0};
    with_others(threads, [&](int64_t thread) {
      numbers |= 1 << thread;
      ++together;
      wait_for([&] { return together == threads; });
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // in which nobody else comes
    });
    std::printf("%d%d ", together == threads, numbers == (1 << threads) - 1);
  }
}
