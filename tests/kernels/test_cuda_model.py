"""The model of CUDA on which compiled operations are tested tells what a kernel does that CUDA does not promise."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

THREADS = 64


@pytest.fixture(scope="module")
def launch(repository, tmp_path_factory) -> Callable[..., str]:
    """Returns a function that launches a kernel of `defects.cpp` and returns what the model says of it."""
    # Imported here: it builds, for which it takes the folder tools/.
    from tests.support.modelled_cuda import build_defects

    run = ctypes.CDLL(str(build_defects(repository, tmp_path_factory.mktemp("defects")))).run
    run.restype = ctypes.c_char_p
    run.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, *[ctypes.c_void_p] * 3]

    def launch(kernel: str, to: Tensor, source: Tensor, last: Tensor, seed: int = 0, blocks: int = 3) -> str:
        pointers = [x.data_ptr() for x in (to, source, last)]
        return run(kernel.encode(), seed, blocks, *pointers).decode()

    return launch


def numbers() -> tuple[Tensor, Tensor, Tensor]:
    """Return the memory of a kernel: what it writes, what it reads, and one number; each with room around it."""
    to, source = torch.zeros(3 * THREADS), torch.arange(3.0 * THREADS)
    return to[THREADS : 2 * THREADS], source[THREADS : 2 * THREADS], torch.zeros(1, dtype=torch.int32)


def test_a_kernel_without_defects_runs(launch):
    to, source, last = numbers()
    assert launch("right", to, source, last) == ""
    assert torch.equal(to, source.flip(0))


@pytest.mark.parametrize("seed", range(20))
def test_a_missing_barrier_shows_in_the_result(launch, seed):
    """A thread that reads before another one has written finds a NaN; that none does has a chance of 2^-32."""
    to, source, last = numbers()
    assert launch("missing_barrier", to, source, last, seed, blocks=1) == ""
    assert not torch.equal(to, source.flip(0))
    assert torch.equal(to[~to.isnan()], source.flip(0)[~to.isnan()])


DEFECTS = {
    "divergent_barrier": r"divergent barrier: of 64 threads of block \d only 63 wait at .*defects\.cpp:\d+",
    "two_barriers": r"divergent barrier: of 64 threads of block \d only (5|59) wait at .*defects\.cpp:\d+",
    "misaligned": r"misaligned access at .*defects\.cpp:\d+: .* at 4 bytes behind a multiple of 16",
    "index_behind_shared": r"thread 63 has index 64 outside of 'float \[64\]' at .*defects\.cpp:\d+",
    "read_behind": r"thread 63 reads 4 bytes outside of the tensors of the call",
    "write_before": r"thread 0 writes 4 bytes outside of the tensors of the call",
    "read_by_host": r"reads 4 bytes of a tensor that the host has read",
    "another_stream": r"a launch on another stream than torch's current one",
    "write_input": r"block \d, thread \d+ writes 4 bytes of a tensor that is only read",
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_ends_the_launch_and_is_named(launch, defect):
    to, source, last = numbers()
    around, before = to._base.clone(), source._base.clone()
    said = launch(defect, to, source, last)
    assert said.startswith("in the model of CUDA: ")
    assert re.search(DEFECTS[defect], said), said
    outside = torch.ones(3 * THREADS, dtype=torch.bool)
    outside[THREADS : 2 * THREADS] = False
    assert torch.equal(to._base[outside], around[outside]) and torch.equal(source._base, before)


def test_a_launch_after_a_defect_is_a_new_one(launch):
    to, source, last = numbers()
    assert launch("divergent_barrier", to, source, last)
    assert launch("right", to, source, last) == ""
    assert torch.equal(to, source.flip(0))


def test_blocks_run_in_an_order_that_follows_from_the_seed(launch):
    """The last of eight blocks is the same one for 20 seeds with a chance of 8^-19."""
    orders = []
    for _ in range(2):
        orders.append([])
        for seed in range(20):
            to, source, last = numbers()
            assert launch("block_order", to, source, last, seed, blocks=8) == ""
            orders[-1].append(int(last))
    assert orders[0] == orders[1] and len(set(orders[0])) > 1


def test_a_launch_that_no_gpu_takes_is_refused(launch):
    said = launch("right", *numbers(), blocks=0)
    assert "no GPU takes a launch of 0 blocks of 64 threads" in said
