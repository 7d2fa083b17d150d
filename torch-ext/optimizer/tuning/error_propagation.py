"""Numbers that carry their rounding errors along, to bound the error of an iteration in half precision."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.formats import unit_roundoff


class Carried:
    """An exact value, float64, and the change that the roundings so far have made to it, to first order.

    An operation passes the changes of its operands on, times its derivative, and adds its own rounding: u |x| for each
    entry x, the most that rounding can change, with a random sign. Numbers that are spread evenly over a binade have
    roundings of 0.42 u |x| in the mean square, so the carried change is 2.4 times the expected one.

    Products of half precision are summed in float32. Each of the k partial sums of c = sum a b is rounded like a
    result. Its size is |c|, or what random terms add up to, the root of the sum of their squares.

    `change` holds DRAWS independent choices of all signs.
    """

    DRAWS = 4

    def __init__(self, value: Tensor, change: Tensor, dtype: torch.dtype, generator: torch.Generator):
        self.value, self.change, self.dtype, self.generator = value, change, dtype, generator
        self.shape, self.device = value.shape, value.device

    @classmethod
    def exact(cls, value: Tensor, seed: int) -> Carried:
        generator = torch.Generator().manual_seed(seed)
        return cls(value, torch.zeros(cls.DRAWS, *value.shape, dtype=value.dtype), torch.float64, generator)

    def error(self) -> float:
        """Return the Frobenius norm of the change, as the root of its mean square over the draws."""
        return torch.linalg.matrix_norm(self.change).square().mean().sqrt().item()

    def to(self, dtype: torch.dtype) -> Carried:
        cast = Carried(self.value, self.change, dtype, self.generator)
        return cast if torch.finfo(dtype).eps <= torch.finfo(self.dtype).eps else cast._rounded()

    @property
    def mT(self) -> Carried:  # noqa: N802, as tensors call it
        return Carried(self.value.mT, self.change.mT, self.dtype, self.generator)

    def add(self, exact: Tensor, alpha: float) -> Carried:
        return Carried(self.value + alpha * exact.double(), self.change, self.dtype, self.generator)._rounded()

    def __matmul__(self, other: Carried) -> Carried:
        return self._summed(other)._rounded()

    def addmm(self, A: Carried, B: Carried, beta: float, alpha: float = 1.0) -> Carried:
        product = A._summed(B)
        value = beta * self.value + alpha * product.value
        return Carried(value, beta * self.change + alpha * product.change, self.dtype, self.generator)._rounded()

    def _summed(self, other: Carried) -> Carried:
        value = self.value @ other.value
        change = self.change @ other.value + self.value @ other.change
        partial = (value**2 + self.value**2 @ other.value**2).sqrt()
        roundoff = unit_roundoff(torch.promote_types(self.dtype, torch.float32))
        change = change + self._signs(value) * roundoff * math.sqrt(self.shape[-1]) * partial
        return Carried(value, change, self.dtype, self.generator)

    def _rounded(self) -> Carried:
        change = self.change + self._signs(self.value) * unit_roundoff(self.dtype) * self.value.abs()
        return Carried(self.value, change, self.dtype, self.generator)

    def _signs(self, value: Tensor) -> Tensor:
        chosen = torch.randint(2, (self.DRAWS, *value.shape), generator=self.generator, dtype=torch.int8)
        return 2.0 * chosen - 1.0
