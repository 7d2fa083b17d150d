"""compute-sanitizer finds nothing in a few small launches of every kernel, which are laws that pytest runs under it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent
LAWS = [
    f"{KERNELS}/test_symmetric_gemm_laws.py::test_nothing_is_read_behind_an_operand",
    f"{KERNELS}/test_symmetric_gemm_laws.py::test_every_entry_is_written_and_nothing_around_it",
    f"{KERNELS}/test_small_polar_laws.py::test_nothing_is_read_behind_a_matrix",
    f"{KERNELS}/test_small_polar_laws.py::test_a_matrix_gets_the_same_bits_alone_and_in_a_batch",
    f"{KERNELS}/test_long_lists.py::test_every_device_gives_the_bits_of_the_cpu",
    f"{KERNELS}/test_move_blocks.py::test_a_list_longer_than_a_launch_moves",
]
# Its blocks hand one another shared memory by instructions of which racecheck has not been seen to know the rules.
ASYNCHRONOUS = [f"{KERNELS}/test_hopper_gemm_laws.py::test_a_replayed_graph_computes_it"]
SECONDS = 150
FOUND = 86


@pytest.mark.gpu
@pytest.mark.parametrize("tool, laws", [("memcheck", [*LAWS, *ASYNCHRONOUS]), ("racecheck", LAWS)])
def test_a_sanitizer_finds_nothing(kernel, tool, laws):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer")
    # An allocator that caches would hide what is read behind a tensor's end.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-m", "pytest", "-m", "gpu"]
    command += ["-p", "no:cacheprovider", *laws]
    root = KERNELS.parents[1]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"it did not end in {SECONDS} s")
    said = [line for line in done.stdout.splitlines() if line.startswith("=========") and len(line) > 10]
    assert done.returncode != FOUND, "\n".join(said[:12])
    if done.returncode:  # some machines do not let it look at the GPU
        pytest.skip(f"it does not work here, status {done.returncode}: {'; '.join(said[:3])}")
