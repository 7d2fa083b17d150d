"""On the CPU the batches of an optimizer take turns in one memory, which it keeps."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from tests.support.allocations import Allocations
from tests.support.inside import plan_of
from tests.support.page_faults import SHAPES

ROOT = Path(__file__).resolve().parents[2]
# glibc then asks the system for each piece of 64 KiB or more, and gives it back as soon as it is free.
EAGER = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
PAGE, FLOAT = 4096, 4


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
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **EAGER}, capture_output=True, text=True, check=True)
    assert int(done.stdout) < min(math.prod(shape) for shape in SHAPES if len(shape) == 2) * FLOAT // PAGE


def test_what_is_kept_is_what_the_largest_batch_takes(kernel):
    """Directions, factors, and two squares for each matrix worked on together; beside them only numbers of metrics."""
    optimizer = optimizer_of(kernel)
    optimizer.step()  # makes the plan
    optimizer._graphs = kernel.step.graphs.UpdateGraphs()
    with Allocations() as allocations:
        optimizer.step()
    kept = 0
    for batch in plan_of(optimizer).batches:
        (m, n), count, work = sorted(batch.packed_shape), len(batch.matrices), batch.iteration.work_dtype.itemsize
        together = min(count, kernel.polar.matrices_together(batch.device, (m, n), batch.iteration))
        kept = max(kept, count * m * n * (batch.packed_dtype.itemsize + work) + 2 * together * m * m * work)
    assert kept <= allocations.held <= kept + 1024
