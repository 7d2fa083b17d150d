"""Proof of a symmetric product on the present device: the exact result, and how far rounding may move it.

Each proof uses a size that will be used, and three matrices that have broken kernels: one with a row that is far larger
than the others, whose squares overflow unless they are scaled in time; one of rank one, whose sums do not cancel; and
one with a NaN, which must stay in its matrix. A matrix must get the same bits alone and in a batch, and the result must
be symmetric to the bit.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from . import roundings

# Coefficients of a step of a published Newton-Schulz iteration: of A², of A and of I. They cancel, so errors show.
ALPHA, BETA, DIAGONAL = 2.0315, -4.775, 3.4445
# A folded scale: float16 Gram matrices have entries up to its square, and the squares of those exceed float16's range.
SCALE = 64.0
# Of larger results MOST_ROWS rows are compared with float64, including the last LAST_ROWS, where tiles are cut.
MOST_ROWS, LAST_ROWS = 64, 32
# Of all rows, sums of NEIGHBOURS elements are compared. The roundings of so few add up to less than a wrong element.
NEIGHBOURS = 64

# The scalars of a plain product, and alpha and beta for matrices that `symmetric` makes.
PLAIN, SCALED = (1.0, 0.0, 0.0), (ALPHA / SCALE**4, BETA / SCALE**2)

# The most columns of the matrices whose Gram matrices test products of squares. More would not change what is tested.
MOST_COLUMNS = 256

# compute(A, B, D, (alpha, beta, diagonal)) returns alpha A B + beta D + diagonal I, which is symmetric.
Compute = Callable[[Tensor, Tensor, Optional[Tensor], tuple], Tensor]


class WrongResultError(AssertionError):
    """A kernel returned something other than it promises. The message says what."""


class Operands(NamedTuple):
    """Matrices as `adversarial` and `symmetric` make them. Proofs do not change them."""

    X: Tensor  # (3, m, k)
    S: Tensor  # (3, m, m)


def operands_of(like: Tensor, size: tuple[int, int]) -> Operands:
    """Draw operands of m x k matrices, on the device and in the dtype of `like`, which may be empty."""
    return Operands(adversarial(like, *size), symmetric(like, size[0]))


def prove_products(compute: Compute, operands: Operands) -> None:
    """Raise WrongResultError unless `compute` is right for X Xᵀ, b A + c A² and A B.

    Nothing is added to the diagonal: not every product does that before it rounds.
    """
    X, S = operands
    prove_gram(compute, X)
    _prove(compute, S, S, S, (*SCALED, 0.0))
    unit = S / SCALE**2  # exact, except for subnormal numbers
    other = (torch.eye(S.size(1), device=S.device) - unit.float()).to(S.dtype)
    check_diagonal(_prove(compute, unit, other, None, PLAIN), unit, other)


def prove_gram(compute: Compute, X: Tensor) -> None:
    """Raise WrongResultError unless `compute` is right for X Xᵀ; its results may be wider than X."""
    check_nan(compute, X, _prove(compute, X, X.mT, None, PLAIN))


def prove_launch(compute: Compute, operands: Operands) -> None:
    """Do what `prove_products` does, also for a I + b A + c A² with one rounding, and check where NaNs of D go.

    X is also given as tall matrices are, as a view with contiguous columns, for which other code is compiled. A NaN in
    D, which may be any matrix, must reach only its place.
    """
    prove_products(compute, operands)
    X, S = operands
    prove_gram(compute, X.mT.contiguous().mT)
    _prove(compute, S, S, S, (*SCALED, DIAGONAL))
    check_nan_in_addend(partial(compute, X, X.mT), S)


def adversarial(like: Tensor, m: int, k: int) -> Tensor:
    """Return X (3, m, k), each of Frobenius norm SCALE: normal entries, rank one, and one dominant row."""
    normal = _normal(m, k)
    X = torch.stack([normal, _normal(m, 1) @ _normal(1, k), normal])
    X[2, m // 2] *= 100 * math.sqrt(m)
    return X.mul_(SCALE / torch.linalg.matrix_norm(X, keepdim=True)).to(like.device, like.dtype)


def symmetric(like: Tensor, m: int) -> Tensor:
    """Return Gram matrices (3, m, m) of matrices as `adversarial` makes them. Their entries reach SCALE squared."""
    X = adversarial(torch.empty(0, dtype=torch.float32, device=like.device), m, min(m, MOST_COLUMNS))
    S = (X @ X.mT).to(like.dtype)
    return S.tril() + S.tril(-1).mT


def check_nan(compute: Compute, X: Tensor, clean: Tensor) -> None:
    """Raise WrongResultError unless a NaN in X makes its row and column of X Xᵀ NaN and changes no other bit.

    `clean` is the product without the NaN. Two matrices are multiplied again, of which one has the NaN.
    """
    clean, spoiled, row = clean[:2], X[:2].clone(), X.size(1) // 2
    spoiled[0, row, X.size(2) // 2] = math.nan
    C = compute(spoiled, spoiled.mT, None, PLAIN)
    hit = torch.zeros_like(C, dtype=torch.bool)
    hit[0, row, :] = hit[0, :, row] = True
    if not torch.equal(C.isnan(), hit):
        raise WrongResultError("a NaN did not stay in its row and column")
    if not torch.equal(torch.where(hit, clean, C), clean):  # indices would take more memory than both
        raise WrongResultError("a NaN changed bits outside its row and column")


def check_nan_in_addend(compute: Callable[[Tensor, tuple], Tensor], D: Tensor) -> None:
    """Raise WrongResultError unless NaNs at two mirrored places of D reach only these places of a sum with D."""
    clean, place = compute(D, (1.0, 1.0, 0.0)), D.size(1) // 2
    spoiled = D.clone()
    spoiled[1, place, 0] = spoiled[1, 0, place] = math.nan
    C, hit = compute(spoiled, (1.0, 1.0, 0.0)), spoiled.isnan()
    if not torch.equal(C.isnan(), hit) or not torch.equal(torch.where(hit, clean, C), clean):
        raise WrongResultError("a NaN of D did not stay in its place")


def check_product(
    C: Tensor,
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor] = None,
    scalars: tuple = PLAIN,
    rows: Optional[Tensor] = None,
) -> None:
    """Raise WrongResultError unless C is alpha A B + beta D + diagonal I up to rounding, and symmetric bit for bit.

    If operands only commute, the upper triangle is compared with the mirrored lower one. `rows` are the rows that are
    compared; None means all.
    """
    if not torch.allclose(C, C.mT, rtol=0, atol=0, equal_nan=True):
        raise WrongResultError("not symmetric")
    rows = torch.arange(C.size(1), device=C.device) if rows is None else rows.to(C.device)
    above = rows[:, None] < torch.arange(C.size(1), device=C.device)
    for i in range(len(C)):  # one at a time, because float64 takes four times the memory
        alpha, addends = _terms(None if D is None else D[i], scalars, C[i])
        addends = [(factor, addend[rows]) for factor, addend in addends]
        exact, allowed = roundings.product(A[i][rows], B[i], alpha, *addends, dtype=C.dtype)
        if not torch.equal(B[i].mT, A[i]):
            mirrored = roundings.product(B[i].mT[rows], A[i].mT, alpha, *addends, dtype=C.dtype)
            exact, allowed = (torch.where(above, other, one) for other, one in zip(mirrored, (exact, allowed)))
        check_entries(C[i][rows], exact, allowed)


def check_sums(
    C: Tensor, A: Tensor, B: Tensor, D: Optional[Tensor], scalars: tuple, *, is_symmetric: bool = True
) -> None:
    """Raise WrongResultError unless sums of neighbours in each row of C, with random signs, are those of the product.

    That covers every element for a fraction of the product's cost. Symmetric results are assumed to be so bit for bit.
    If their operands only commute, the upper triangle is the mirrored lower one, and sums that cross the diagonal are
    left out. Source: Freivalds, Probabilistic machines can use less running time (1977).
    """
    signs = _signs_of_neighbours(C.size(2)).to(C.device)
    row = torch.arange(C.size(1), device=C.device)[:, None]
    start = torch.arange(0, C.size(2), NEIGHBOURS, device=C.device)
    for i in range(len(C)):
        alpha, addends = _terms(None if D is None else D[i], scalars, C[i])
        exact, allowed = roundings.sums_of_product(A[i], B[i], alpha, addends, signs)
        if is_symmetric and not torch.equal(B[i].mT, A[i]):
            mirrored = roundings.sums_of_product(B[i].mT, A[i].mT, alpha, addends, signs)
            exact, allowed = (torch.where(row < start, other, one) for other, one in zip(mirrored, (exact, allowed)))
            allowed[(row >= start) & (row < start + NEIGHBOURS)] = math.inf
        sums, magnitudes = roundings.sums_of_neighbours(C[i], signs)
        magnitudes += NEIGHBOURS * torch.finfo(C.dtype).smallest_normal  # each number has at least this one's rounding
        check_entries(sums, exact, allowed + roundings.rounding_error(magnitudes, C.dtype))


def check_diagonal(C: Tensor, A: Tensor, B: Tensor) -> None:
    """Raise WrongResultError unless blocks around the diagonal of C are those of A B, which `check_sums` leaves out."""
    for start in range(0, C.size(1), NEIGHBOURS):
        block = slice(start, start + NEIGHBOURS)
        check_product(C[:, block, block], A[:, block], B[:, :, block])


def checked_rows(m: int) -> Tensor:
    """Return the rows that are compared: all, or the last ones, the middle one and others spread evenly."""
    if m <= MOST_ROWS:
        return torch.arange(m, device="cpu")
    spread = torch.linspace(0, m - LAST_ROWS - 1, MOST_ROWS - LAST_ROWS - 1, device="cpu").long()
    middle, last = torch.tensor([m // 2], device="cpu"), torch.arange(m - LAST_ROWS, m, device="cpu")
    return torch.cat([spread, middle, last]).unique()


def _terms(D: Optional[Tensor], scalars: tuple, like: Tensor) -> tuple[float, list[roundings.Addend]]:
    """Return alpha, and the addends of a product: D if there is one, and a unit matrix if the diagonal is not 0."""
    alpha, beta, diagonal = map(float, scalars)
    addends = [] if D is None else [(beta, D)]
    if diagonal:
        addends.append((diagonal, torch.eye(*like.shape, device=like.device)))
    return alpha, addends


def _prove(compute: Compute, A: Tensor, B: Tensor, D: Optional[Tensor], scalars: tuple) -> Tensor:
    """Return alpha A B + beta D + diagonal I after its proof."""
    C = alone_as_in_a_batch(compute, A, B, D, scalars)
    check_product(C, A, B, D, scalars, checked_rows(C.size(1)))
    check_sums(C, A, B, D, scalars)
    return C


def alone_as_in_a_batch(compute: Compute, A: Tensor, B: Tensor, D: Optional[Tensor], scalars: tuple) -> Tensor:
    """Return what `compute` returns. Raises WrongResultError unless the last matrix gets the same bits alone.

    The last one is what remains when others were shared out evenly; `check_nan` puts the others into another batch.
    """
    C = compute(A, B, D, scalars)
    one = slice(-1, None)
    if not torch.equal(compute(A[one], B[one], None if D is None else D[one], scalars), C[one]):
        raise WrongResultError("other bits alone than in a batch")
    return C


def check_entries(C: Tensor, exact: Tensor, allowed: Tensor) -> None:
    """Raise WrongResultError unless each entry of C differs by at most what is allowed from the exact one."""
    error = (C.double() - exact).abs()
    if not (error.isfinite() & (error <= allowed)).all():
        raise WrongResultError(f"an error is {(error / allowed).max().item():.1e} times what rounding can explain")


def _signs_of_neighbours(n: int) -> Tensor:
    """Return random signs (groups, NEIGHBOURS) for n neighbours, float64, and zeros in the rest of the last group."""
    signs = torch.zeros(-(-n // NEIGHBOURS) * NEIGHBOURS, dtype=torch.float64, device="cpu")
    signs[:n] = torch.randint(2, (n,), generator=torch.Generator("cpu").manual_seed(1), device="cpu") * 2 - 1
    return signs.view(-1, NEIGHBOURS)


def _normal(*shape: int) -> Tensor:
    """Return normal entries in float32, the same ones at every call and on every device."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
