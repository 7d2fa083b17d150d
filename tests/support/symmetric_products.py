"""Operands of the symmetric product as they may lie in memory, and the package's proof of it for tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.support.proofs import products
from tests.support.spectra import SPECTRA, with_spectrum

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUTS = ("contiguous", "transposed", "sliced", "misaligned", "expanded", "polynomials")
ALPHA, BETA, DIAGONAL = products.ALPHA, products.BETA, products.DIAGONAL
WrongResultError, check_product = products.WrongResultError, products.check_product
# Multiples of 16 that no tile divides, so that operands are aligned and tiles at the edges are cut, and no multiples.
PROVEN_SIZES = ((272, 208), (127, 200))

# launch(A, B, D, C, (alpha, beta, diagonal)) writes alpha A B + beta D + diagonal I into C.
Launch = Callable[..., None]


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


def product(launch: Launch, A: Tensor, B: Tensor, D: Tensor | None = None, scalars=products.PLAIN, C=None) -> Tensor:
    """Return what a launch writes into C, which held NaN."""
    C = A.new_empty(A.size(0), A.size(1), A.size(1)) if C is None else C
    launch(A, B, D, C.fill_(math.nan), scalars)
    return C


def scaled_product(module, A: Tensor, B: Tensor, D: Tensor | None, scalars: tuple) -> Tensor:
    """Return the product of kernels/gpu/symmetric_gemm.py with scalars (alpha, beta, diagonal)."""
    alpha, beta, diagonal = scalars
    return module.symmetric_gemm(A, B, D, alpha, beta, diagonal=diagonal)


def prove_product(launch: Launch, dtype: torch.dtype, sizes=PROVEN_SIZES) -> None:
    """Raise WrongResultError unless a launch computes the product on the default device, in each of the sizes."""
    for size in sizes:
        products.prove_launch(partial(product, launch), products.operands_of(torch.empty(0, dtype=dtype), size))


def check_nan(compute: Callable[..., Tensor], X: Tensor) -> None:
    """Raise WrongResultError unless a NaN in X reaches, in X Xᵀ, its row and column, and changes no other bit."""
    products.check_nan(lambda A, B, *_: compute(A, B), X, compute(X, X.mT))
