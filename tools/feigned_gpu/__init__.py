"""GPUs that are none: torch for CUDA over a runtime whose device memory is the host's.

    tests ─► package, torch for CUDA, Triton's launcher: as on a GPU
                  │
             devices.cpp      CUDA's runtime: devices and errors,
             memory.cpp       memory and copies,
             streams.cpp      streams, events, captures and graphs; kernels do nothing
             libraries.py     compiles these, and empty libraries for the rest
             operations.py    what kernels would have computed: torch's operations for CPUs, over the same memory
             launches.py      the same for Triton's kernels
             plugin.py        puts all of that into each Python process

So tests for GPUs run where none is, with everything that the host does: torch's allocator and its pools, which calls a
capture forbids, arguments of launches, and where tensors are. What the kernels themselves compute is tested elsewhere.

    make feigned-gpu
    make feigned-gpu TESTS="tests/kernels/test_small_polar.py -k strides"
"""
