"""How many pages a step asks the system for, on its own in a process: `python -m tests.support.page_faults VARIANTS`.

It prints the pages of the later steps. Memory that a program frees may stay in the process. So the caller sets
environment variables with which glibc gives back all it can.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from torch.nn import Parameter

from tests.support.rank_pool import load_kernel

SHAPES = [(256, 512)] * 3 + [(512, 256)] * 2 + [(512, 1536), (768, 1024), (1024,)]
FIRST, LATER = 3, 10  # steps: Python's own memory and torch's caches grow in the first ones


def pages_of_later_steps(variants: Path) -> int:
    """Return the pages that all later steps of an optimizer over SHAPES ask for."""
    kernel = load_kernel(variants)
    parameters = [(f"layers.{i}.weight", Parameter(torch.ones(shape))) for i, shape in enumerate(SHAPES)]
    for _, p in parameters:
        p.grad = torch.linspace(-1, 1, p.numel()).view_as(p)
    optimizer = kernel.Muon(parameters, lr=1e-3)
    for _ in range(FIRST):
        optimizer.step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(LATER):
        optimizer.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


if __name__ == "__main__":
    print(pages_of_later_steps(Path(sys.argv[1])))
