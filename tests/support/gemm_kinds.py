"""The dtypes that the product on CPUs multiplies, and the instructions that do it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# The best first.
SETS = {BFLOAT16: ("amx", "avx512_bf16", "portable"), FLOAT32: ("avx512", "avx2", "portable")}


class Kind(NamedTuple):
    """A dtype, instructions that multiply it, and the dtype of results."""

    dtype: torch.dtype
    instructions: str
    result: torch.dtype

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Return normal entries of this dtype."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)


KINDS = [Kind(dtype, name, dtype) for dtype, names in SETS.items() for name in names]
# Their results are wider than their operands.
WIDER_KINDS = [Kind(BFLOAT16, name, FLOAT32) for name in SETS[BFLOAT16]]


def name_of(kind: Kind) -> str:
    """Return its name in the names of tests."""
    return f"{kind.dtype}-{kind.instructions}-{kind.result}".replace("torch.", "")


def skip_unless_here(native, kind: Kind) -> None:
    """Skip a test if this processor lacks the instructions: the best ones say which are here."""
    names = SETS[kind.dtype]
    if names.index(kind.instructions) < names.index(native.gemm_instructions(kind.dtype)):
        pytest.skip(f"this processor has no {kind.instructions}")
