"""The model of tests/hopper_model, as operations of torch on the CPU."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from tools.build.commands import run
from tools.build.machines import TORCH

MODEL = Path("tests/hopper_model")
SOURCES = ("operations.cpp", "run.cpp", "model.cpp", "fibers.cpp")
# Of torch 2.11, the oldest that the package runs with.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x20b000000000000"


class Omitted(IntEnum):
    """What the kernel's code may leave out in the model."""

    NOTHING = 0
    WAIT_FOR_BUFFER = 1
    FIRST_SYNC = 2
    SECOND_SYNC = 3
    PUBLISH = 4
    FINISH_STORES = 5
    FINISH_LOADS = 6
    FENCE = 7


class Way(NamedTuple):
    """How a product is run: by so many clusters, `together` at one time, in an order that follows from the seed."""

    clusters: int = 2
    together: int = 1
    seed: int = 0
    omitted: Omitted = Omitted.NOTHING
    piece: int = 100  # matrices of a launch


class Scalars(NamedTuple):
    """Of alpha A B + beta D + diagonal I."""

    alpha: float = 1.0
    beta: float = 0.0
    diagonal: float = 0.0


PLAIN, USUAL = Scalars(), Way()


def build(repository: Path, folder: Path) -> Path:
    """Compile the model; return the library, whose operations these functions call once it is loaded."""
    folders = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    options = ["-std=c++20", "-O2", "-march=native", "-fPIC", "-shared", STABLE_ABI, *folders]
    library = folder / "hopper_model.so"
    run(["g++", *options, *(repository / MODEL / name for name in SOURCES), "-o", library, *libraries])
    return library


def sections(count: int, m: int, k: int, into: int) -> Tensor:
    """Return a row for each section of `count` results (m, m), in the order of the kernel, int32.

    The last squares are cut into `into` sections.

    Columns: matrix, row, column, which section of how many, the square's number among those that are cut, the first
    tile along k and how many.
    """
    side = -(-m // 256)
    rows = torch.full((count * 8 * side * (side + 1) // 2, 8), -1, dtype=torch.int32)
    torch.ops.hopper_model.sections(rows, count, m, k, into)
    return rows[rows[:, 0] >= 0]


def triangle_rows(indices: Tensor) -> Tensor:
    """Return the row of each index of a walk through a lower triangle row by row, int32."""
    rows = torch.empty_like(indices, dtype=torch.int32)
    torch.ops.hopper_model.triangle_rows(rows, indices.int())
    return rows


def product(
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor] = None,
    scalars: tuple = PLAIN,
    way: Way = USUAL,
    sections: int = 1,
) -> Tensor:
    """Return alpha A B + beta D + diagonal I as the model computes it."""
    C = A.new_full((A.size(0), A.size(1), A.size(1)), torch.nan)
    torch.ops.hopper_model.product(C, A, B, D, *scalars, sections, *way)
    return C
