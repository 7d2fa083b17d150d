"""What the symmetric product should return, and how far roundings may take it from there.

`prove_product` is asked by the tests of the kernel, in Triton's interpreter and on a GPU, and by the tuner before it
writes a configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.support import oracles
from tests.support.spectra import SPECTRA, dominant_row, rank_one, with_spectrum

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUTS = ("contiguous", "transposed", "sliced", "misaligned", "expanded", "polynomials")
# One step of a published Newton-Schulz iteration has such coefficients: they cancel, so roundings show.
ALPHA, BETA = 2.0315, -4.775
# The norm of a Gram matrix whose square leaves float16's range, unless the coefficient is multiplied first.
PEAK = 1024.0
# Multiples of 16 that no tile divides, so that operands are aligned and tiles at the edges are cut, and no multiples.
PROVEN_SIZES = ((272, 208), (127, 200))

# launch(A, B, D, C, (alpha, beta)) writes alpha A B + beta D into C.
Launch = Callable[..., None]


class WrongResultError(AssertionError):
    """A kernel computed something else than it promises; the message says what."""


def normal(*shape: int, dtype=torch.float32, seed: int = 0) -> Tensor:
    """Normal entries, such that products over the last dimension are about 1; the same on every device."""
    drawn = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return (drawn / math.sqrt(max(shape[-1], 1))).to(torch.get_default_device(), dtype)


def symmetric(batch: int, m: int, dtype=torch.float32, seed: int = 1) -> Tensor:
    """Symmetric matrices whose eigenvalues are 1 / n, of both signs."""
    with torch.device("cpu"):
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(m)[:m]
        vectors = [with_spectrum(SPECTRA["flat"](m), m, m, seed + n) for n in range(batch)]
        S = torch.stack([Q @ torch.diag(signs * SPECTRA["power_law"](m)) @ Q.mT for Q in vectors])
    return ((S + S.mT) / 2).to(torch.get_default_device(), dtype)


def adversarial(m: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return X (3, m, k) and S (3, m, m) on the default device: of normal entries, of one dominant row, of rank one.

    All X have a norm of about sqrt(PEAK). S are the last two's Gram matrices, and one with eigenvalues of both signs.
    """
    with torch.device("cpu"):
        X = torch.stack([normal(m, k).double(), dominant_row(m, k, 2), rank_one(m, k, 3)])
        X *= math.sqrt(PEAK) / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(1e-30)
        S = torch.cat([PEAK * symmetric(1, m, torch.float64), X[1:] @ X[1:].mT])
    return tuple(x.to(torch.get_default_device(), dtype) for x in (X, S))


def every_other(x: Tensor) -> Tensor:
    """Return the values of x in every other row and column of a larger buffer, not from its start."""
    buffer = x.new_full((x.size(0) + 1, 2 * x.size(1) + 1, 2 * x.size(2) + 3), math.nan)
    return buffer[1:, 1::2, 3::2].copy_(x)


def operands(layout: str, batch: int, m: int, k: int, dtype) -> tuple[Tensor, Tensor]:
    """Return A and B, whose product is symmetric, as they may lie in memory."""
    X = normal(batch, m, k, dtype=dtype)
    if layout == "transposed":
        X = X.mT.contiguous().mT
    elif layout == "sliced":
        X = every_other(X)
    elif layout == "misaligned":  # at an address that is no multiple of 16 bytes
        X = X.new_empty(X.numel() + 1)[1:].view(X.shape).copy_(X)
    elif layout == "expanded":
        X = X[:1].expand(batch, m, k)
    elif layout == "polynomials":
        S = symmetric(batch, m).double()
        return (3 * S + 2 * S @ S).to(dtype), (torch.eye(m, dtype=S.dtype) - S @ S).to(dtype)
    return X, X.mT


def check_product(C: Tensor, A: Tensor, B: Tensor, D: Tensor | None = None, scalars=(1.0, 0.0)) -> None:
    """Raise WrongResultError unless C is alpha A B + beta D but for its roundings, and symmetric, bit for bit."""
    if not torch.allclose(C, C.mT, rtol=0, atol=0, equal_nan=True):
        raise WrongResultError("not symmetric")
    for i in range(len(C)):  # one by one: float64 takes four times the memory
        matrix = slice(i, i + 1)
        D_i = None if D is None else D[matrix]
        exact, allowed = oracles.symmetric_product(A[matrix], B[matrix], D_i, *map(float, scalars))
        error = (C[matrix].double() - exact).abs()
        if not (error <= allowed).all():
            raise WrongResultError(f"an error of {(error / allowed).max().item():.1e} times what roundings allow")


def product(launch: Launch, A: Tensor, B: Tensor, D: Tensor | None = None, scalars=(1.0, 0.0), C=None) -> Tensor:
    """Return what a launch writes into C, which held NaN."""
    C = A.new_empty(A.size(0), A.size(1), A.size(1)) if C is None else C
    launch(A, B, D, C.fill_(math.nan), scalars)
    return C


def prove_product(launch: Launch, dtype: torch.dtype, sizes=PROVEN_SIZES) -> None:
    """Raise WrongResultError unless a launch computes the product on the default device, with and without D.

    Matrices have normal entries, one dominant row, or rank one. A matrix must get the bits in a batch that it gets
    alone, and a NaN must reach its row and column and no other bit; one in D reaches its place.
    """
    compute = partial(product, launch)
    small = ALPHA / PEAK**2, BETA / PEAK
    for m, k in sizes:
        X, S = adversarial(m, k, dtype)
        for A, B, D, scalars in (X, X.mT, None, (1.0, 0.0)), (S, S, S, small):
            C = compute(A, B, D, scalars)
            check_product(C, A, B, D, scalars)
            if not torch.equal(compute(A[1:2], B[1:2], None if D is None else D[1:2], scalars), C[1:2]):
                raise WrongResultError("other bits alone than in a batch")
        check_nan(compute, X)
        check_nan_in_addend(partial(compute, X, X.mT, scalars=(1.0, 1.0)), S)


def check_nan(compute: Callable[..., Tensor], X: Tensor) -> None:
    """Raise WrongResultError unless a NaN in X reaches, in X Xᵀ, its row and column, and changes no other bit."""
    clean, row = compute(X, X.mT), X.size(1) // 2
    spoiled = X.clone()
    spoiled[1, row, 3] = math.nan
    C = compute(spoiled, spoiled.mT)
    hit = torch.zeros_like(C, dtype=torch.bool)
    hit[1, row, :] = hit[1, :, row] = True
    if not torch.equal(C.isnan(), hit):
        raise WrongResultError("a NaN is elsewhere than in its row and column")
    if not torch.equal(C[~hit], clean[~hit]):
        raise WrongResultError("a NaN changed other bits than those of its row and column")


def check_nan_in_addend(compute: Callable[[Tensor], Tensor], D: Tensor) -> None:
    """Raise WrongResultError unless NaN in two mirrored places of D reach theirs in a sum with D, and no other bit."""
    clean, place = compute(D), D.size(1) // 2
    spoiled = D.clone()
    spoiled[1, place, 0] = spoiled[1, 0, place] = math.nan
    C, hit = compute(spoiled), spoiled.isnan()
    if not torch.equal(C.isnan(), hit) or not torch.equal(C[~hit], clean[~hit]):
        raise WrongResultError("a NaN of D is elsewhere than in its place")
