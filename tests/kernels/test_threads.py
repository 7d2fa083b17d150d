"""The library's own threads: they are a process's own, and compute as the thread that calls them does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_has_threads_of_its_own(native):
    """The child calls nothing else that has threads: torch's own are not in it, and would be waited for."""
    if native.IS_PORTABLE:
        pytest.skip("products are torch's, whose threads a fork leaves behind")
    torch.set_num_threads(2)
    A, B, C, expected = random(4, 200, 300), random(4, 300, 250, seed=1), random(4, 200, 250), random(4, 200, 250)
    native.gemm_(expected, A, B, None, 1.0, 0.0, False, native.gemm_instructions(A.dtype))
    wanted = bytes(expected.untyped_storage())
    child = os.fork()
    if child == 0:
        native.gemm_(C, A, B, None, 1.0, 0.0, False, native.gemm_instructions(A.dtype))
        works_alone = sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1
        os._exit(0 if bytes(C.untyped_storage()) == wanted and not works_alone else 1)
    end = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0), "it hangs, has other bits, or has no threads"


FORKS_FIRST = """
import os, signal, sys, time
from pathlib import Path
import torch
from tests.support.rank_pool import load_kernel

tasks = lambda: set(os.listdir("/proc/self/task")) if sys.platform == "linux" else set()
processors = lambda those: [sorted(os.sched_getaffinity(int(task))) for task in those]

native = load_kernel(Path(sys.argv[1])).kernels.native
torch.set_num_threads(2)
before = tasks()
torch.ones(2000, 2000).add_(1)  # starts torch's threads, which a fork leaves behind
with_torchs = tasks()
A, C = torch.ones(4, 256, 256), torch.empty(4, 256, 256)
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends a child that hangs
    native.gemm_(C, A, A, None, 1.0, 0.0, False, native.gemm_instructions(A.dtype))
    os._exit(0)
ended = os.waitpid(child, 0)[1]
native.gemm_(C, A, A, None, 1.0, 0.0, False, native.gemm_instructions(A.dtype))
torchs, ours, end = with_torchs - before, tasks() - with_torchs, time.monotonic() + 20
while processors(ours) != processors(torchs) and time.monotonic() < end:
    time.sleep(0.01)  # a new thread is bound when it begins
print([ended, processors(torchs), processors(ours)])
"""


@pytest.fixture(scope="module")
def forks_first(native) -> list:
    """What a process that OpenMP binds to processors has seen: how its child ended, and where each thread may run that
    torch has started, and each that the library has.
    """
    if native.IS_PORTABLE:
        pytest.skip("products are torch's, whose threads a fork leaves behind")
    variants = Path(native.__file__).parents[2]
    command, bound = [sys.executable, "-c", FORKS_FIRST, str(variants)], {**os.environ, "OMP_PROC_BIND": "true"}
    said = subprocess.run(command, env=bound, check=True, timeout=120, capture_output=True, text=True).stdout
    return json.loads(said.splitlines()[-1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_may_fork_before_its_first_product(forks_first):
    assert forks_first[0] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="here threads are bound to no processors")
def test_the_librarys_threads_run_where_torchs_may(forks_first):
    """On the processor of a caller that is bound to it they would wait for the caller."""
    _, torchs, ours = forks_first
    if len(torchs) != 1:
        pytest.skip("torch has no threads of OpenMP here")
    assert ours == torchs


def share_of_others(native, X: Tensor) -> float:
    """Return the time that others than this thread have worked on a product, as a part of what this thread has."""
    start, alone = time.process_time(), time.thread_time()
    native.gemm_(torch.empty_like(X), X, X, None, 1.0, 0.0, False, native.gemm_instructions(X.dtype))
    together, alone = time.process_time() - start, time.thread_time() - alone
    return together / alone - 1


def test_so_many_threads_work_as_torch_would_use(native):
    """One alone, and with two also the one that has gone to sleep since the last call."""
    if native.IS_PORTABLE:
        pytest.skip("products are torch's, and have its threads")
    X = torch.ones(1, 1024, 1024)
    torch.set_num_threads(1)
    assert min(share_of_others(native, X) for _ in range(5)) < 0.1
    torch.set_num_threads(2)
    end = time.monotonic() + 30
    while (share := share_of_others(native, X)) < 0.3 and time.monotonic() < end:
        time.sleep(0.02)
    assert share >= 0.3


def test_threads_take_small_numbers_for_what_their_caller_does(native):
    """Whether these are zero is a setting of each thread, and which of them gets what is chance."""
    if native.IS_PORTABLE:
        pytest.skip("the passes have torch's threads, which keep settings of their own")
    torch.set_num_threads(2)
    X = torch.full((8, 300, 700), 1e-41)
    norms = torch.empty(8, dtype=torch.float64)
    native.frobenius_norm_(norms, X)  # with which threads begin
    kept = torch.ones(X.shape)
    try:
        assert torch.set_flush_denormal(True)
        for _ in range(20):
            momentum = [torch.ones(300, 700) for _ in range(8)]
            native.momentum_pack_(momentum, list(X), kept.zero_(), 0.0, False)
            assert len({bool(m.count_nonzero()) for m in momentum}) == 1
            assert all(torch.equal(m == 0, (momentum[0] == 0)) for m in momentum)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="this system has no g++")
def test_what_a_thread_throws_its_caller_gets_when_all_have_ended(repository, tmp_path):
    """They are there for the next call, and one beside it waits for nobody. No operation throws at will.

    Of those that are there a call takes as many as it asks for, each with a number of its own.
    """
    # Imported here: it builds, for which it takes the folder tools/.
    from tools.build.commands import run
    from tools.build.machines import TORCH

    folders = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    options = ["-std=c++20", "-O1", "-pthread", "-DTORCH_TARGET_VERSION=0x20b000000000000", *folders]
    run(["g++", *options, repository / "tests/threads/main.cpp", "-o", tmp_path / "threads"])
    assert run([tmp_path / "threads"]).split() == ["111"] * 4 + ["11"] * 3
