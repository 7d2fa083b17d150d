"""The products a Newton-Schulz iteration is made of, as one value: another backend is another table, not a branch."""

from __future__ import annotations

import math
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from .autocast import without_autocast
from .native import gemm_, gemm_instructions
from .tuned import measured_entries, nearest_of

try:
    from . import small_polar, symmetric_gemm
except ModuleNotFoundError as missing:
    if missing.name != "triton":  # which builds of torch for CPUs do not bring
        raise
    small_polar = symmetric_gemm = None


class Products(NamedTuple):
    """Products over wide matrices X (..., m, n) and symmetric A, B (..., m, m); each returns a new tensor.

    `affine` may overwrite B, and X, which may be what it returns. Products of polynomials of one matrix commute, but
    for rounding: full ones err least where all factors come from one side, symmetric ones, which drop what the upper
    triangle knows, from both.
    """

    gram: Callable[[Tensor], Tensor]  # X -> X Xᵀ
    gram_affine: Callable[[Tensor, float, float], Tensor]  # A, b, c -> b A + c A²
    commuting: Callable[[Tensor, Tensor], Tensor]  # A, B -> A B, of two polynomials of one matrix
    conjugated: Callable[[Tensor, Tensor], Tensor]  # A, B -> A B A, of the same
    affine: Callable[[Tensor, Tensor, float], Tensor]  # B, X, a -> a X + B X
    name: str
    batched: bool = True  # takes X (B, m, n), not one (m, n) at a time
    # How many times faster than torch's product: X Xᵀ, and the products of two m x m matrices.
    gram_gain: float = 1.0
    square_gain: float = 1.0


# What `gemm_` multiplies bfloat16 with on this processor; without instructions for it torch's products are faster.
_INSTRUCTIONS = gemm_instructions()


def _native(
    A: Tensor, B: Tensor, D: Optional[Tensor] = None, alpha: float = 1.0, beta: float = 0.0, symmetric: bool = False
) -> Tensor:
    C = A.new_empty(A.size(0), A.size(1), B.size(2))
    gemm_(C, A, B, D, alpha, beta, symmetric, _INSTRUCTIONS)
    return C


def _native_affine(B: Tensor, X: Tensor, a: float) -> Tensor:
    # In place, so that half as much has to fit into the cache.
    gemm_(X, B, X, X if a else None, 1.0, a, False, _INSTRUCTIONS)
    return X


def _single_affine(B: Tensor, X: Tensor, a: float) -> Tensor:
    return torch.addmm(X, B, X, beta=a) if a else torch.mm(B, X)


def _one_by_one_affine(B: Tensor, X: Tensor, a: float) -> Tensor:
    products = [_single_affine(*matrices, a) for matrices in zip(B, X)]
    return torch.stack(products) if len(products) > 1 else products[0].unsqueeze(0)


def _batched_affine(B: Tensor, X: Tensor, a: float) -> Tensor:
    # (a I + B) X, since torch's a X + B X copies X first.
    if a:
        add_to_diagonal_(B, a)
    return torch.bmm(B, X)


SINGLE = Products(
    gram=lambda X: torch.mm(X, X.mT),
    gram_affine=lambda A, b, c: torch.addmm(A, A, A, beta=b, alpha=c),
    commuting=torch.mm,
    conjugated=lambda A, B: torch.mm(torch.mm(B, A), A),
    affine=_single_affine,
    name="torch.mm",
    batched=False,
)
NATIVE = Products(
    gram=lambda X: _native(X, X.mT, symmetric=True),
    gram_affine=lambda A, b, c: _native(A, A, A, alpha=c, beta=b, symmetric=True),
    commuting=lambda A, B: _native(A, B, symmetric=True),
    conjugated=lambda A, B: _native(A, _native(B, A, symmetric=True), symmetric=True),
    affine=_native_affine,
    name=f"gemm_ ({_INSTRUCTIONS})",
)
# Of long and of large matrices the product that is not symmetric is the larger part, and torch's is faster with AMX.
NATIVE_SYMMETRIC = NATIVE._replace(affine=_one_by_one_affine, name=f"{NATIVE.name} + torch.mm")
BATCHED = Products(
    gram=lambda X: torch.bmm(X, X.mT),
    gram_affine=lambda A, b, c: torch.baddbmm(A, A, A, beta=b, alpha=c),
    commuting=torch.bmm,
    conjugated=lambda A, B: torch.bmm(torch.bmm(B, A), A),
    affine=_batched_affine,
    name="torch.bmm",
)
SYMMETRIC = BATCHED._replace(
    gram=lambda X: symmetric_gemm.symmetric_gemm(X, X.mT),
    gram_affine=lambda A, b, c: symmetric_gemm.symmetric_gemm(A, A, A, alpha=c, beta=b),
    commuting=lambda A, B: symmetric_gemm.symmetric_gemm(A, B),
    conjugated=lambda A, B: symmetric_gemm.symmetric_gemm(A, symmetric_gemm.symmetric_gemm(B, A)),
    name="symmetric_gemm",
)


def add_to_diagonal_(A: Tensor, a: float) -> Tensor:
    """Add `a` to each diagonal of A (..., m, m) in place, and return A."""
    A.diagonal(dim1=-2, dim2=-1).add_(a)
    return A


def select_products(device: torch.device, dtype: torch.dtype, m: int, n: int, differentiable: bool = False) -> Products:
    """Return the table for wide m x n matrices: `SINGLE` for one matrix (m, n) at a time, the others for (B, m, n).

    On a CPU bfloat16 is multiplied by the compiled product where the processor has instructions for it. The libraries
    behind torch's products on CPUs split the sum over k by how many matrices there are, so that a matrix would get
    other bits in a batch than alone; one at a time it cannot. On a GPU each symmetric product is the symmetric kernel's
    where that was measured to be faster; `name` says which are, and where nothing was measured. Only torch's products
    are `differentiable`.
    """
    if device.type == "cpu":
        if dtype != torch.bfloat16 or _INSTRUCTIONS == "portable" or differentiable:
            return SINGLE
        return NATIVE_SYMMETRIC if _INSTRUCTIONS == "amx" and _is_long_or_large(m, n) else NATIVE
    if differentiable:
        return BATCHED
    gram, square = symmetric_gain(device, dtype, m, n), symmetric_gain(device, dtype, m, m)
    if gram is None or square is None:
        return BATCHED._replace(name="torch.bmm (symmetric_gemm unmeasured)")
    long = SYMMETRIC if gram >= 1 else BATCHED
    short = SYMMETRIC if square >= 1 else BATCHED
    name = " + ".join(dict.fromkeys(table.name for table in (long, short, BATCHED)))
    gains = max(gram, 1.0), max(square, 1.0)
    return Products(long.gram, short.gram_affine, short.commuting, short.conjugated, BATCHED.affine, name, True, *gains)


def fits_a_core(m: int, n: int) -> bool:
    """Whether a core of a CPU does well to work alone on m x n matrices: 8 MiB of bfloat16 for an iteration's tensors.

    Chosen by timing both ways on two cores with AMX: larger ones are better shared by all cores.
    """
    return 2 * (2 * m * n + 2 * m * m) <= 2**23


def _is_long_or_large(m: int, n: int) -> bool:
    """Whether `sweep_orthogonalize.py` shows torch's product that is not symmetric ahead on two cores with AMX."""
    return not fits_a_core(m, n) and (m >= 1536 or n >= 3 * m)


def symmetric_gain(device: torch.device, dtype: torch.dtype, m: int, k: int) -> Optional[float]:
    """Return torch's time over the symmetric kernel's for (m, k) on this device, from the nearest measurement.

    None where nothing was measured, or cannot apply: there are no measurements of sizes that divide by no 16.
    """
    return None if m % 16 or k % 16 else nearest_of(_measured_gains(device, dtype, "symmetric_gemm"), m, k)


def small_gain(device: torch.device, dtype: torch.dtype, m: int, n: int) -> Optional[float]:
    """Return the time of the iteration over products over that of the kernel which does all of it, for small m x n.

    None where nothing was measured, or where the kernel takes no matrices of this size.
    """
    if symmetric_gemm is None or not small_polar.fits(m, n, dtype):
        return None
    return nearest_of(_measured_gains(device, dtype, "small_polar"), m, n)


@torch.compiler.assume_constant_result
def _measured_gains(device: torch.device, dtype: torch.dtype, kernel: str) -> tuple[tuple[int, int, float], ...]:
    if symmetric_gemm is None or device.type != "cuda" or not torch.cuda.is_available():
        return ()
    entries = measured_entries(torch.cuda.get_device_name(device), dtype, kernel)
    return tuple((entry["m"], entry["k"], entry["gain"]) for entry in entries)


def matmul_transpose(X: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """Return X Xᵀ (..., m, m) of X (..., m, k), of X's dtype, written to `out` where that is given.

    Bit for bit symmetric where the symmetric kernel runs; elsewhere, and where a gradient is wanted, it is torch's
    product and as symmetric as that. Raises ValueError for fewer than two dimensions, dtypes that are not floating
    point, or an `out` that does not fit or shares X's storage.
    """
    if X.ndim < 2 or not X.is_floating_point():
        raise ValueError(f"matmul_transpose needs real floating-point X (..., m, k), got {tuple(X.shape)} {X.dtype}")
    if out is not None:
        _check_result(out, X)
    wants_gradient = torch.is_grad_enabled() and X.requires_grad
    if wants_gradient or (symmetric_gain(X.device, X.dtype, *X.shape[-2:]) or 0) < 1:
        with without_autocast(X.device.type):
            return torch.matmul(X, X.mT, out=out)
    batch = X.reshape(math.prod(X.shape[:-2]), *X.shape[-2:])
    if out is not None and out.is_contiguous():
        symmetric_gemm.symmetric_gemm(batch, batch.mT, out=out.view(len(batch), X.size(-2), X.size(-2)))
        return out
    product = symmetric_gemm.symmetric_gemm(batch, batch.mT).reshape(*X.shape[:-1], X.size(-2))
    return product if out is None else out.copy_(product)


def _check_result(out: Tensor, X: Tensor) -> None:
    shape = (*X.shape[:-1], X.size(-2))
    if (tuple(out.shape), out.dtype, out.device) != (shape, X.dtype, X.device):
        raise ValueError(
            f"out must be {shape} {X.dtype} on {X.device}, got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if torch._C._is_alias_of(out, X):
        raise ValueError("out must not share its storage with X, which is still read while out is written")
