"""The matrices that `sweep_orthogonalize.py` measures: those of named models, squares, and any given shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from benchmarks.shapes import MODELS, SQUARES, TINY_MODEL, matrix_counts

GROUPS = ("squares", "gpt2-124m", "moe-64", "llama-8b", "llama-70b", "vit-s", "resnet-50")
CPU_GROUPS = ("squares", "gpt2-124m", "moe-64", "vit-s", "resnet-50")

# m² n of 2048 x 2048: the largest that a CPU measures by default, and the largest that is compared with float64.
CPU_SIZE = 2**33
# float32 bytes of the matrices in one call: more than the caches of a GPU, and a few small ones on a CPU.
BATCH_BYTES = {"cuda": 1 << 28, "cpu": 1 << 23}


class Case(NamedTuple):
    """Matrices rows x cols. The models have `count` of them; `batch` are timed in one call."""

    models: tuple[str, ...]
    count: int
    batch: int
    rows: int
    cols: int

    @property
    def key(self) -> str:
        return f"{self.batch}x{self.rows}x{self.cols}"

    @property
    def sides(self) -> tuple[int, int]:
        """Short and long side."""
        return min(self.rows, self.cols), max(self.rows, self.cols)

    @property
    def size(self) -> int:
        m, n = self.sides
        return m * m * n


def find_cases(names: Sequence[str], device: torch.device) -> list[Case]:
    """Return a case for each shape in `names`, which are groups or shapes `BxMxN`. ValueError for other names."""
    cases: dict[str, Case] = {}
    for name in names:
        for case in _cases_of(name, device):
            before = cases.get(case.key)
            if before:
                case = before._replace(models=(*before.models, name), count=before.count + case.count)
            cases[case.key] = case
    return list(cases.values())


def _cases_of(name: str, device: torch.device) -> list[Case]:
    if name in MODELS or name == "tiny":
        counts = matrix_counts(MODELS.get(name, TINY_MODEL))
    elif name == "squares":
        counts = dict.fromkeys(SQUARES, 1)
    else:
        sizes = name.split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f"shapes must be of {', '.join(MODELS)}, squares, or like 64x1280x512, got {name!r}")
        return [Case((name,), int(sizes[0]), *map(int, sizes))]
    limit = BATCH_BYTES[device.type]
    return [
        Case((name,), count, min(count, max(1, limit // (4 * rows * cols))), rows, cols)
        for (rows, cols), count in counts.items()
    ]


def default_cases(device: torch.device) -> list[Case]:
    """Return the default cases of a device; on a CPU they take minutes."""
    if device.type == "cpu":
        return [case for case in find_cases(CPU_GROUPS, device) if case.size <= CPU_SIZE]
    return find_cases(GROUPS, device)
