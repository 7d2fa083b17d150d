"""Proof of a whole iteration in one launch: the exact result, and how far rounding may move it.

It uses the same kinds of matrices as `proof.py`: normal entries, one dominant row, and rank one.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.formats import unnormalized_dtype
from ..kernels.gpu.small_steps import steps_of
from ..kernels.newton_schulz import gram_newton_schulz
from ..kernels.product_table import Products
from ..schedules import resolve_schedule, value_at, with_folded_scale
from .error_propagation import Carried
from .proof import WrongResultError

Steps = Sequence[tuple[float, float, float]]

SCALE = 4.0
# A matrix of rank one has a single singular value. Its roundings, about 16, may all go in one direction, which moves it
# 4 times as far as the random signs of `Carried` do.
ONE_WAY = 4.0


def _polynomial(A: Carried, b: float, c: float, a: float, out: None = None) -> Carried:
    B = A.addmm(A, A, beta=b, alpha=c)
    return B.add(torch.eye(A.shape[-1], dtype=torch.float64), alpha=a) if a else B


# Each product as the kernel multiplies, and rounded where it rounds.
CARRIED = Products(
    gram=lambda X, out=None: X @ X.mT,
    gram_affine=_polynomial,
    commuting=lambda Q, H, out=None: H @ Q,
    conjugated=lambda H, R: H @ (H @ R),
    affine=lambda Q, X, a, out=None: X.addmm(Q, X, beta=a) if a else Q @ X,
    name="carried",
)


def in_windows(schedule: Steps, lengths: Sequence[int], scale: float) -> list[Steps]:
    """Return the schedule in windows of `lengths` steps, for X times `scale` (`with_folded_scale`)."""
    folded, ends = with_folded_scale(schedule, scale), list(itertools.accumulate(lengths))
    return [folded[end - length : end] for end, length in zip(ends, lengths)]


def exact(G: Tensor, schedule: Steps) -> Tensor:
    """Return the polynomial of G, divided by its Frobenius norm, in float64."""
    U, sigma, Vh = torch.linalg.svd(G.cpu().double(), full_matrices=False)
    return U @ torch.diag(_composed(schedule, sigma / torch.linalg.vector_norm(sigma))) @ Vh


def largest_error(G: Tensor, windows: Sequence[Steps], scale: float, dtype: torch.dtype) -> float:
    """Return how far, in the Frobenius norm, the roundings of the kernel's iteration may move its result.

    `Carried` draws random signs for roundings of the largest possible size, 2.4 times the expected one. Dividing by the
    norm in float32 moves X by less than rounding it to the work dtype, which comes next.
    """
    with torch.device("cpu"):
        return _carried(G.cpu(), windows, scale, dtype).error()


def _carried(G: Tensor, windows: Sequence[Steps], scale: float, dtype: torch.dtype) -> Carried:
    """Return the result of the kernel's iteration, with the changes by its roundings."""
    X = Carried.exact(scale * G.double() / torch.linalg.matrix_norm(G.double()), 0).to(torch.float32).to(dtype)
    return gram_newton_schulz(X, windows, CARRIED, dtype)


def check_errors(C: Tensor, results: Sequence[tuple[Tensor, float]]) -> None:
    """Raise WrongResultError unless each matrix of C is as near to its exact result as is allowed."""
    for c, (result, allowed) in zip(C.cpu(), results):
        error = torch.linalg.matrix_norm(c.double() - result).item()
        if not error <= allowed:
            raise WrongResultError(f"{tuple(C.shape)}: error {error:.1e} where {allowed:.1e} is allowed")


def adversarial(m: int, n: int) -> Tensor:
    """Return G (3, m, n) on the CPU, float32 with few bits: normal entries, one dominant row, and rank one."""
    generator = torch.Generator("cpu").manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    drawn, column, row = normal(3, m, n), normal(m, 1), normal(1, n)
    drawn[1, m // 2] *= 100 * math.sqrt(m)
    drawn[2] = _of_four_bits(column) @ _of_four_bits(row)  # bfloat16 holds these products exactly: the rank stays one
    return drawn.bfloat16().float()


def prove_small(
    launch: Callable[..., None], like: Tensor, size: tuple[int, int], side: int, lengths: Sequence[int]
) -> None:
    """Raise WrongResultError unless a launch is right for matrices of `size`, and for a size that no tile divides.

    `launch(G, C, steps, (scale, eps, dtype))` writes C, on the device and in the work dtype of `like`. It takes windows
    of `lengths` steps, and as many steps in windows of one. Matrices lie in rows, and in columns as tall ones do, in
    float32 and as steps pack them: for each number of steps, order and dtype other code is compiled. A matrix must get
    the same bits alone and in a batch, and a NaN must stay in its matrix.
    """
    dtypes = dict.fromkeys((torch.float32, unnormalized_dtype(like.dtype)))
    sizes, schedule = dict.fromkeys([(side - 3, 4 * side - 1), size]), resolve_schedule("polar_express", sum(lengths))
    for (m, n), each in itertools.product(sizes, dict.fromkeys([(1,) * len(schedule), tuple(lengths)])):
        G, windows = adversarial(m, n), in_windows(schedule, each, SCALE)
        allowed = (luck * largest_error(g, windows, SCALE, like.dtype) for g, luck in zip(G, (1.0, 1.0, ONE_WAY)))
        results = [(exact(g, schedule), error) for g, error in zip(G, allowed)]
        for ordered, dtype in itertools.product((G, G.mT.contiguous().mT), dtypes):
            packed = ordered.to(like.device, dtype, copy=True)  # exact: `adversarial` has no more bits than bfloat16
            _prove_batch(partial(_factors, launch, steps_of(windows), like.dtype), packed, results)


def _factors(launch: Callable[..., None], steps: Sequence[float], dtype: torch.dtype, G: Tensor) -> Tensor:
    C = torch.full_like(G, math.nan, dtype=dtype)
    launch(G, C, steps, (SCALE, 0.0, dtype))
    return C


def _prove_batch(factors: Callable[[Tensor], Tensor], G: Tensor, results: Sequence[tuple[Tensor, float]]) -> None:
    """Raise WrongResultError unless the factors of G are those of its `results`, in a batch and alone. Changes G."""
    C, size = factors(G), f"{G.size(1)} x {G.size(2)}"
    check_errors(C, results)
    if any(not torch.equal(factors(G[i : i + 1]), C[i : i + 1]) for i in range(len(G))):
        raise WrongResultError(f"{size}: other bits alone than in a batch")
    G[0, 0, 0] = math.nan
    spoiled = factors(G)
    if not spoiled[0].isnan().all() or not torch.equal(spoiled[1:], C[1:]):
        raise WrongResultError(f"{size}: a NaN changed another matrix, or did not spread over its own")


def _of_four_bits(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((16 * mantissa).round() / 16, exponent)


def _composed(schedule: Steps, x: Tensor) -> Tensor:
    for quintic in schedule:
        x = value_at(quintic, x)
    return x
