"""On the CPU the batches of an optimizer take turns in one memory, which it keeps."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from tests.support.allocations import Allocations
from tests.support.inside import plan_of
from tests.support.page_faults import SHAPES

ROOT = Path(__file__).resolve().parents[2]
# glibc then asks the system for each piece of 64 KiB or more, and gives it back as soon as it is free.
# Threads have stacks, whose pages come with their first work: so there are two, which all take part from the start.
EAGER = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2"}
FLOAT, LINE = 4, 64  # bytes


def optimizer_of(kernel):
    parameters = [(f"layers.{i}.weight", Parameter(torch.ones(shape))) for i, shape in enumerate(SHAPES)]
    for _, p in parameters:
        p.grad = torch.ones_like(p)
    return kernel.Muon(parameters, lr=1e-3)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets variables of glibc")
def test_a_step_asks_the_system_for_no_pages(kernel):
    """All later steps together ask for less than the smallest matrix has, however eager the allocator is."""
    optimizer = optimizer_of(kernel)
    optimizer.step()
    if kernel.kernels.native.IS_PORTABLE or not all(b.iteration.products.in_place for b in plan_of(optimizer).batches):
        pytest.skip("needs a compiled product of this processor that works in place")
    command = [sys.executable, "-m", "tests.support.page_faults", str(Path(kernel.__file__).parents[1])]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **EAGER}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    smallest = min(math.prod(shape) for shape in SHAPES if len(shape) == 2) * FLOAT
    assert int(done.stdout) < smallest // os.sysconf("SC_PAGE_SIZE")


def test_parts_begin_at_lines_as_new_tensors_do(kernel):
    """Libraries sum in another order at other addresses: 33 x 33 numbers do not fill lines."""
    p = Parameter(torch.ones(33, 35))
    p.grad = torch.ones_like(p)
    optimizer = kernel.Muon([("layers.0.weight", p)], lr=1e-3, ns_dtype="float64")
    optimizer.step()
    (batch,) = plan_of(optimizer).batches
    directions, factors, squares = optimizer._graphs._host.views(batch, 1)
    assert all(part.data_ptr() % LINE == 0 for part in (directions, factors, *squares))


def test_parts_of_a_gpus_memory_begin_where_its_allocator_would_let_them(kernel):
    """At multiples of 512 bytes. Other operands may get other kernels, which sum in another order."""
    memory_parts = kernel.kernels.memory_parts
    parts = [((3, 5), torch.float16), ((128,), torch.float32), ((2,), torch.int8)]
    needed = memory_parts.bytes_of(parts, memory_parts.DEVICE_ALIGNMENT)
    memory = torch.empty(needed, dtype=torch.uint8, device="cpu")
    cut = memory_parts.parts_of(memory, parts, memory_parts.DEVICE_ALIGNMENT)
    assert [part.data_ptr() - memory.data_ptr() for part in cut] == [0, 512, 1024] and needed == 1536
    assert [(part.shape, part.dtype) for part in cut] == parts


def test_what_is_kept_is_what_the_largest_batch_takes(kernel):
    """Directions, factors, and squares for each matrix that is worked on at once. Metrics add a few numbers."""
    optimizer = optimizer_of(kernel)
    optimizer.step()  # makes the plan
    optimizer._graphs = kernel.step.graphs.UpdateGraphs()
    with Allocations() as allocations:
        optimizer.step()
    kept = 0
    for batch in plan_of(optimizer).batches:
        (m, n), count, work = sorted(batch.packed_shape), len(batch.matrices), batch.iteration.work_dtype.itemsize
        together = min(count, kernel.polar.packing.matrices_together(batch.device, (m, n), batch.iteration))
        squares, dtype = batch.iteration.squares
        room = squares * together * m * m * dtype.itemsize
        kept = max(kept, count * m * n * (batch.packed_dtype.itemsize + work) + room)
    assert kept <= allocations.held <= kept + 1024


def test_products_of_one_matrix_at_a_time_keep_memory_for_one(kernel):
    """As those of float64: to stack matrices would save nothing."""

    def kept(count: int) -> int:
        parameters = [(f"layers.{i}.weight", Parameter(torch.ones(64, 96))) for i in range(count)]
        optimizer = kernel.Muon(parameters, lr=1e-3, ns_dtype="float64")
        for _ in range(2):  # the first makes the plan
            optimizer._graphs = kernel.step.graphs.UpdateGraphs()
            for _, p in parameters:
                p.grad = torch.ones_like(p)
            with Allocations() as allocations:
                optimizer.step()
        return allocations.held

    one = kept(1)
    assert 2 * 64 * 96 * torch.float64.itemsize <= one <= kept(5) <= one + 1024  # metrics add a few numbers


def bytes_in_use() -> int:
    """Return what glibc has handed out to this process: by its heaps, and by pages of their own."""
    fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    kind = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in fields]})
    function = ctypes.CDLL(None).mallinfo2
    function.restype = kind
    said = function()
    return said.uordblks + said.hblkhd


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc counts from release 2.33 on")
def test_memory_of_a_large_call_is_given_back(kernel):
    """A thread keeps up to 4 MiB for its next call. Here the sums of 64 elements each take 8."""
    norms, X = torch.zeros(1, dtype=torch.float64), torch.ones(1).expand(1, 2**10, 2**16)
    before = bytes_in_use()
    kernel.kernels.native.frobenius_norm_(norms, X)
    assert bytes_in_use() - before < 2**20
    assert norms.item() == 2.0**13


class Batch:
    """Of 4 numbers a matrix, of which each thread works on one."""

    def memory(self, count: int):
        sizes = (count, 4), (count, 4), (torch.get_num_threads(), 4, 4)
        return [(size, torch.float32) for size in sizes]


def test_views_are_as_large_as_the_matrices_and_torchs_threads_ask_for(kernel):
    """Batches take turns in one memory, which is made anew only where it is too small."""
    memory, batches = kernel.step.batch_memory.BatchMemory(), (Batch(), Batch())
    for threads in (2, 1, 2):
        torch.set_num_threads(threads)
        for count in (2, 8):
            views = [memory.views(batch, count) for batch in batches]
            for directions, factors, (squares,) in views:
                assert [len(x) for x in (directions, factors, squares)] == [count, count, threads]
                assert directions.data_ptr() == views[0].directions.data_ptr() == memory._bytes.data_ptr()
    assert memory.views(batches[0], 8) is memory.views(batches[0], 8)


def test_memory_that_grows_is_never_held_twice(kernel):
    memory, batch = kernel.step.batch_memory.BatchMemory(), Batch()
    with Allocations() as allocations:
        for count in (8, 80):
            memory.views(batch, count)
    assert allocations.peak == allocations.held >= 2 * 80 * 4 * FLOAT


def test_batches_of_earlier_plans_are_forgotten(kernel):
    memory, batch = kernel.step.batch_memory.BatchMemory(), Batch()
    memory.views(batch, 1)
    known = weakref.ref(batch)
    del batch
    gc.collect()
    assert known() is None
