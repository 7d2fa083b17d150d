"""The arithmetic of elements, on tensors: the formulas of `optimizer_common/element.h`.

Only functions that round each element once are used: one product, one sum, one quotient. `lerp`, `addcmul` and `add`
with `alpha` may fuse a product with a sum for some elements and not for others, such as those after the last whole
vector; then bits would depend on strides and on where a shard is cut. The compiled operations fuse each product that
feeds a sum, so they round once where two functions round twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import HALF_DTYPES

# SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), as signed numbers: int64
# products and sums wrap around like unsigned ones.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def computing_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic: float64 if any of `dtypes` is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def number(value: float, like: Tensor) -> Tensor:
    """Return a number as a 0-d tensor: instead of dividing by a Python number, torch may multiply by its inverse."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def have_one_sign(a: Tensor, b: Tensor) -> Tensor:
    """Return where both are above zero or both below. Not by the sign of the product, which underflows."""
    return ((a > 0) & (b > 0)) | ((a < 0) & (b < 0))


def lerp(average: Tensor, value: Tensor, weight: float) -> Tensor:
    """Return average + weight (value - average), with three roundings.

    With a weight of 1 nothing of the average is left, be it infinite or NaN.
    """
    return value.clone() if weight == 1 else average + (value - average) * weight


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x rounded once to `dtype`. torch rounds float64 to half precision by way of float32, so twice."""
    if x.dtype == torch.float64 and dtype in HALF_DTYPES:
        x = _rounded_to_odd(x)
    return x.to(dtype)


def _rounded_to_odd(x: Tensor) -> Tensor:
    """Return the float32 towards zero from float64 x, its last bit set if that is not x itself.

    Rounding it to half precision gives what rounding x would.
    """
    nearest = x.float()
    back = nearest.double()
    bits = nearest.view(torch.int32) - (back.abs() > x.abs()).int()
    return (bits | (back != x).int()).view(torch.float32)


def random_bits(seeds: Tensor, indices: Tensor) -> Tensor:
    """Return 64 random bits, int64, of the elements at `indices` in whole matrices with these seeds, int64."""
    return _mix(_mix(seeds + _INCREMENT) + indices * _INCREMENT)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Return int64 z, taken as unsigned, shifted to the right."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def round_stochastically(x: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, rounded up or down to a number of a half-precision dtype by random bits, in the dtype of x.

    As many random bits as `dtype` drops are added to the bits of |x|, and the rest is cut: the probability to round up
    is the distance from the lower neighbour over the spacing. Below the smallest normal number the spacing stays what
    it is just above, so rounding happens there.
    """
    wide, grid = torch.finfo(x.dtype), torch.finfo(dtype)
    dropped = round(grid.eps / wide.eps).bit_length() - 1
    integer = torch.int32 if x.dtype == torch.float32 else torch.int64
    size = x.abs()
    shift = torch.where(size < grid.smallest_normal, number(grid.smallest_normal, x), number(0.0, x))
    bits = (size + shift).view(integer) + _shifted(random, 64 - dropped).to(integer)
    rounded = (bits >> dropped << dropped).view(x.dtype) - shift
    return torch.where(x.isfinite(), rounded.copysign(x), x)
