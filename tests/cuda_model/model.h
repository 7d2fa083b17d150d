// How a GPU runs a kernel, as far as CUDA promises it: on the CPU, in one thread.
//
// Blocks run in random order. The threads of a block are fibers; from barrier to barrier they run in random order, too.
// A kernel that needs another order than CUDA promises gives other results here, from one seed to the next. Shared
// memory starts as NaN patterns. What CUDA leaves undefined throws std::runtime_error with block, thread and place:
//
//     a barrier that not all threads of a block reach        model.cpp
//     an access that is not aligned to its size              memory.cpp, told by the compiler's alignment sanitizer
//     an index outside of an array                           memory.cpp, by its bounds sanitizer
//     an access outside of the tensors of a call,            memory.cpp, by the calls with which its address sanitizer
//     or a write to one that is only read                    for kernels reports every access
//     a tensor that both the host and a kernel read: where   memory.cpp
//     one reaches it the other does not
//     a launch on another stream than torch's current one    model.cpp
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace cuda_model {

struct Index {
  unsigned x = 0;
};
extern Index block_index, thread_index;  // of the fiber that runs

struct Grid {
  int64_t blocks;
  int threads;
  const void* stream;
  const void* parameters;
  size_t parameter_bytes;
};

// Runs a kernel, `body`, on every thread of a grid.
void run(const Grid& grid, const std::function<void()>& body);

// Torch's current stream.
void* current_stream();

// Waits for all threads of the block.
void barrier(const char* file, int line);

// The order in which blocks and threads run from here on follows from the seed.
void seed(uint64_t number);

// Whether the caller is a thread of a kernel; what such a thread has for itself, and what it may read besides.
bool in_kernel();
bool is_on_stack(uintptr_t address);
bool is_parameter(uintptr_t address);

// Ends the launch from within a kernel: `run` throws the text, with the thread that it was.
[[noreturn]] void fail(const std::string& text);

// Memory that kernels may read, and write where it is `written`, until the next `forget`.
void allow(const void* begin, size_t bytes, bool written);
void forget();

// The shared memory of the calling thread's blocks, and how it is filled with NaN patterns.
void find_shared();
void poison_shared();

}  // namespace cuda_model
