"""Tests for GPUs pass on a feigned one, and fail there where the host does wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.build.compilers import find_nvcc

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stacks,  # it installs torch for CUDA
    pytest.mark.skipif(find_nvcc() is None, reason="the variant for CUDA needs nvcc"),
]

# The first test discards its graph on purpose. In the second one graphs are kept only if all launches of a kernel
# compute, not just the first one in the process, which goes another way.
TESTS = [
    "tests/muon/test_replayed_steps.py::test_a_graph_that_is_not_kept_takes_nothing_from_the_next",
    "tests/muon/test_replayed_steps.py::test_replayed_steps_have_the_bits_of_eager_ones[cuda-torch.float32-{}]",
]
# FSDP2 gathers and scatters on the GPUs of four ranks; each ends with the bits of one process.
TESTS_OF_RANKS = ["tests/ranks/test_fsdp2.py::test_fsdp2_backward_passes_end_as_in_one_process[fsdp-nccl]"]
BESIDE_A_CAPTURE = """
import pytest, torch

pytestmark = pytest.mark.gpu


def captured(work):
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = work(x)
    x.fill_(5)
    graph.replay()
    return y


def test_a_replay_computes_with_what_is_there(kernel):
    assert captured(lambda x: 2 * x + 1).tolist() == [11, 11, 11]


def test_a_capture_waits_for_nothing(kernel):
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(lambda x: x.sum().item())


def test_what_nobody_wrote_is_no_number(kernel):
    torch.cuda.empty_cache()
    assert torch.empty(1 << 22, device="cuda").isnan().all()  # too large for a block that somebody has used
"""


def run(repository: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.feigned_gpu", "-m", "gpu or multi_gpu", *arguments]
    return subprocess.run(command, cwd=repository, text=True, capture_output=True)


@pytest.mark.parametrize("variant", [(), ("--portable",)], ids=["compiled", "portable"])
def test_a_step_of_replayed_graphs_passes(repository, variant):
    result = run(repository, *variant, *TESTS)
    assert result.returncode == 0 and "2 passed" in result.stdout, result.stdout + result.stderr


def test_ranks_with_a_gpu_each_pass(repository):
    result = run(repository, *TESTS_OF_RANKS)
    assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout + result.stderr


def test_captures_replays_and_new_memory_are_those_of_a_gpu(repository, request):
    file = repository / "tests/kernels/_of_a_feigned_gpu.py"
    request.addfinalizer(lambda: file.unlink(missing_ok=True))
    file.write_text(BESIDE_A_CAPTURE)
    result = run(repository, str(file))
    assert result.returncode == 0 and "3 passed" in result.stdout, result.stdout + result.stderr
