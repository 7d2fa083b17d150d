"""The dtypes that the product on CPUs multiplies, and the instructions that do it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# The best first.
SETS = {BFLOAT16: ("amx", "avx512_bf16", "portable"), FLOAT32: ("avx512", "avx2", "portable")}


class Kind(NamedTuple):
    """A dtype and instructions that multiply it."""

    dtype: torch.dtype
    instructions: str

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Return normal entries of this dtype."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)


KINDS = [Kind(dtype, name) for dtype, names in SETS.items() for name in names]
