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
# Nothing is captured: without torch's caching allocator a capture forbids the memory of sections.
ASYNCHRONOUS = [
    f"{KERNELS}/test_hopper_gemm_laws.py::test_products_of_integers_are_exact[{case}-1-264-72-torch.float16]"
    for case in ("1-none", "3-of A")
]
# What a call of CUDA refuses is raised, and some calls only ask. So memcheck reports what kernels do, and that alone.
TOOLS = {
    "memcheck": (["--report-api-errors", "no"], [*LAWS, *ASYNCHRONOUS]),
    "racecheck": ([], LAWS),
}
SECONDS = 150
FOUND = 86
# Statuses of pytest: tests failed, it was interrupted, it broke, or there is no such test.
FAILED = range(1, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_finds_nothing(kernel, tool):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer")
    sanitize(sanitizer, tool)


def sanitize(sanitizer: str, tool: str) -> None:
    """Run a tool's laws under the sanitizer. Fail if it finds something or a law fails; skip if it does not work."""
    # An allocator that caches would hide what is read behind a tensor's end.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options, laws = TOOLS[tool]
    command = [sanitizer, "--tool", tool, *options, "--error-exitcode", str(FOUND), sys.executable, "-m", "pytest"]
    command += ["-m", "gpu", "-p", "no:cacheprovider", *laws]
    root = KERNELS.parents[1]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"it did not end in {SECONDS} s")
    said = [line for line in done.stdout.splitlines() if line.startswith("=========") and len(line) > 10]
    assert done.returncode != FOUND, "\n".join(said[:12])
    assert done.returncode not in FAILED, f"status {done.returncode}: {done.stdout[-4000:]}{done.stderr[-2000:]}"
    if done.returncode:  # some machines do not let it look at the GPU
        pytest.skip(f"it does not work here, status {done.returncode}: {'; '.join(said[:3])}")


@pytest.mark.parametrize(
    "status, outcome, words",
    [
        (FOUND, AssertionError, "Invalid __global__ read"),
        (1, AssertionError, "a law that failed"),
        (4, AssertionError, "a law that failed"),
        (5, pytest.skip.Exception, "status 5: ========= Invalid"),
        (255, pytest.skip.Exception, "status 255"),
    ],
)
def test_failed_laws_are_no_sanitizer_that_does_not_work(tmp_path, status, outcome, words):
    sanitizer = tmp_path / "compute-sanitizer"
    lines = "========= Invalid __global__ read", "a law that failed"
    sanitizer.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), f"exit {status}"]))
    sanitizer.chmod(0o755)
    with pytest.raises((AssertionError, pytest.skip.Exception), match=words) as raised:
        sanitize(str(sanitizer), "memcheck")
    assert raised.type is outcome
