"""`frobenius_norm_` and `normalize_`: the norm of each matrix, or of each row, and what is divided by it.

    frobenius_norm_(norms, X)                   norms = |X|_F             of each matrix or row
    normalize_(out, X, norms, eps, scale)       out = scale X / max(norms, eps)

X and `out` are batches (B, m, n) of any strides, float32, float16 or bfloat16; `out` may be X itself. `norms` is
contiguous: (B) for matrices, (B, m) for rows. It has `formats.exact_dtype` of the device: float64, or float32 where it
has none, as on Apple's GPUs. `eps` is at least 0. A row gets the bits that it has as a matrix of its own.

- Squares are summed in float64, where the square of a float32 number is exact and cannot overflow. The order of the sum
  follows from m and n alone. scale / max(norms, eps, 2^-126) is rounded to float32 once, at most to its largest number.
  Each product with it is rounded to float32 once, too, before the cast.
- `normalize_` gives a matrix and the same matrix times a power of two the same bits, as long as both norms are at least
  eps, and they and their inverses are normal numbers of float32.

Where `exact_dtype` is float32, a norm is that of a matrix scaled by a power of two, so that no square overflows, and
those that vanish do not count. It errs by at most (18 + t) / 2 roundings to float32, t = ceil(log2(ceil(m n / 16))),
and is infinite if float32 cannot hold it. scale / max(norms, eps, 2^-126) is rounded twice.
"""

from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import Tensor

from ..formats import HALF_DTYPES, dtype_name, exact_dtype
from .memory import Memory, is_same
from .refusals import name_of, place, shown

NORM_SCHEMA = "(Tensor(a!) norms, Tensor X) -> ()"
NORMALIZE_SCHEMA = "(Tensor(a!) out, Tensor X, Tensor norms, float eps, float scale) -> ()"

# A matrix is cut into so many parts, whose squares are first added to one another: so there are as many times
# fewer sums than elements.
_PARTS = 16

# The exponent's bits of a float32 number, and those of the smallest and the largest power of two with a normal inverse.
_EXPONENT, _LEAST, _MOST = 255 << 23, 1 << 23, 253 << 23


def frobenius_norm_(norms: Tensor, X: Tensor) -> None:
    """Write the Frobenius norm of each matrix of X (B, m, n) to `norms` (B), or that of each row to `norms` (B, m)."""
    _check_batch("X", X, X)
    _check_norms_of_either(norms, X)
    memory = Memory()
    memory.write("norms", norms)
    memory.read("X", X)
    memory.check()
    if norms.ndim == 2:
        norms, X = norms.view(-1), X.reshape(norms.numel(), 1, X.size(2))
    if norms.dtype == torch.float64:
        norms.copy_(_sum_of_squares(X).sqrt_())
    else:
        scale, inverse = _powers_of_two(X)
        norms.copy_(_sum_of_squares(X, inverse).sqrt_() * scale)


def normalize_(out: Tensor, X: Tensor, norms: Tensor, eps: float, scale: float) -> None:
    """Write scale X / max(norms, eps) to `out`, both (B, m, n), with `norms` of matrices (B) or of rows (B, m)."""
    _check_batch("X", X, X)
    _check_batch("out", out, X)
    _check_norms_of_either(norms, X)
    if not eps >= 0:
        raise RuntimeError(f"eps must be at least 0, got {eps:g}")
    memory = Memory()
    memory.write("out", out)
    memory.read("X", None if is_same(out, X) else X)
    memory.read("norms", norms)
    memory.check()
    norms = norms.unsqueeze(-1) if norms.ndim == 2 else norms.view(-1, 1, 1)
    torch.mul(X, multiplier(norms, eps, scale, torch.float32), out=out)


def multiplier(norm: Tensor, eps: float, scale: float, dtype: torch.dtype) -> Tensor:
    """Return scale / max(norm, eps) in `dtype`: what matrices with these norms are multiplied by.

    It is finite, so that zeros stay zeros. A norm below the smallest normal number has no digits left that could be
    scaled up.
    """
    limits = torch.finfo(dtype)
    return (scale / norm.clamp_min(max(eps, limits.tiny))).clamp_max(limits.max).to(dtype)


def norms_of_wide_(norms: Tensor, batch: Tensor) -> None:
    """Write the norms that passes compute beside their results: those of `batch` (B, rows, cols), as wide matrices."""
    frobenius_norm_(norms, batch.mT if batch.size(1) > batch.size(2) else batch)


def check_norms_of(name: str, batch: Tensor, offsets: Optional[Sequence[int]], norms: Optional[Tensor]) -> None:
    """Refuse `norms`, if they are given, that `norms_of_wide_` cannot write for `batch`."""
    if norms is None:
        return
    if offsets is not None:
        raise RuntimeError("norms need a batch, so offsets must not be given")
    if batch.dtype == torch.float64:
        raise RuntimeError(f"norms are those of float32, float16 or bfloat16, but {name} is Double")
    check_norms(norms, batch)


def check_norms(norms: Tensor, X: Tensor) -> None:
    """Check that `norms` has one number for each matrix of X, where X is."""
    _check_place_of_norms(norms, X)
    if norms.shape != X.shape[:1] or not norms.is_contiguous():
        raise RuntimeError(f"norms must be ({len(X)}), contiguous, got {shown(norms.shape)}")


def _check_norms_of_either(norms: Tensor, X: Tensor) -> None:
    if norms.ndim != 2:
        check_norms(norms, X)
        return
    _check_place_of_norms(norms, X)
    if norms.shape != X.shape[:2] or not norms.is_contiguous():
        raise RuntimeError(f"norms of rows must be {shown(X.shape[:2])}, contiguous, got {shown(norms.shape)}")


def _check_place_of_norms(norms: Tensor, X: Tensor) -> None:
    exact = exact_dtype(X.device)
    if norms.device != X.device or norms.dtype != exact:
        needed = f"{dtype_name(exact)} on {place(X)}"
        raise RuntimeError(f"norms must be {needed}, got {name_of(norms.dtype)} on {place(norms)}")


def _powers_of_two(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return a power of two (B) near the largest magnitude of each matrix of X (B, m, n), and its inverse, float32.

    Products with them are exact as long as they are normal numbers. Largest magnitudes times the inverse are from 1 to
    4, so that squares do not overflow, and those that vanish would not have changed the sum. Infinities and NaN stay.
    """
    if X.numel() == 0:
        return (torch.ones(len(X), dtype=torch.float32, device=X.device),) * 2
    largest = torch.maximum(X.amax((1, 2)), -X.amin((1, 2))).float()
    bits = (largest.view(torch.int32) & _EXPONENT).clamp_(_LEAST, _MOST)
    return bits.view(torch.float32), (_LEAST + _MOST - bits).view(torch.float32)


def _sum_of_squares(X: Tensor, factors: Optional[Tensor] = None) -> Tensor:
    """Return the sum (B) of squares of each matrix of X (B, m, n), in float64; of factors (B) times X, in float32.

    The order of the sum follows from m and n alone, so it is written out: torch may cut a sum by its number of threads.
    With t = ceil(log2(ceil(m n / 16))), a square goes through at most 16 + t roundings.
    """
    flat = X.reshape(len(X), X.size(1) * X.size(2))
    length = max(1, -(-flat.size(1) // _PARTS))
    dtype = torch.float64 if factors is None else torch.float32
    sums = torch.zeros(len(X), length, dtype=dtype, device=X.device)
    for part in flat.split(length, 1):
        part = part.to(dtype)
        sums[:, : part.size(1)] += (part if factors is None else part * factors.unsqueeze(1)).square_()
    while sums.size(1) > 1:
        half = -(-sums.size(1) // 2)
        sums[:, : sums.size(1) - half] += sums[:, half:]
        sums = sums[:, :half]
    return sums[:, 0]


def _check_batch(name: str, t: Tensor, X: Tensor) -> None:
    if t.device != X.device:
        raise RuntimeError(f"{name} must be on {place(X)} like X, got {place(t)}")
    if t.dtype not in (torch.float32, *HALF_DTYPES):
        raise RuntimeError(f"{name} must be float32, float16 or bfloat16, got {name_of(t.dtype)}")
    if t.ndim != 3:
        raise RuntimeError(f"{name} must be (batch, rows, cols), got {shown(t.shape)}")
    if t.shape != X.shape:
        raise RuntimeError(f"{name} must have the shape {shown(X.shape)} of X, got {shown(t.shape)}")
