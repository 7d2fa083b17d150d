"""Orthogonalization: the approximate polar factor of a matrix by odd polynomials, using matrix products only."""

from __future__ import annotations

import operator
import sys
from functools import partial
from numbers import Real
from typing import Callable, Generator, Optional, Sequence, Union

import torch
from torch import Tensor

from ..iteration import DTYPES, Iteration, check_work_dtype, choose_iteration, default_work_dtype
from ..kernels.autocast import without_autocast
from ..kernels.circumstances import Circumstances
from ..kernels.formats import is_dtensor, shown
from ..kernels.newton_schulz import (
    apply_window,
    gram_matrix,
    gram_newton_schulz,
    newton_schulz,
    places_in_turn,
    window_product,
)
from ..kernels.normalization import frobenius_norm, native_passes_take, normalize
from ..kernels.products import small_polar
from ..kernels.tracing import constant_while_traced, is_transformed
from ..schedules import Schedule, resolve_schedule
from .chains import Operand, broadcast_norms, chain_key, chained_polar_factors
from .packing import even_pieces, matrices_together, packed_together


def orthogonalize(
    G: Tensor,
    ns_coefficients: Union[str, Sequence] = "polar_express",
    ns_steps: int = 5,
    *,
    dtype: Optional[torch.dtype] = None,
    eps: float = 1e-7,
    method: str = "auto",
) -> Tensor:
    """Return p(G / max(|G|_F, eps)), the approximate polar factor U Vᵀ of each matrix G = U diag(sigma) Vᵀ.

    G is (..., m, n) in float16, bfloat16, float32 or float64, and is not changed. The result has its shape and dtype,
    and autograd differentiates it. p composes the steps of the schedule, a name or coefficients as for `Muon`, and
    changes only the singular values. Those of G / |G|_F that start within the schedule's interval end in its band,
    smaller ones end below the band, and zero stays zero. Rounding in the work `dtype` is amplified by up to the product
    of the first coefficients. `dtype` None is float64 for a G in float64, else float16 on CUDA devices, bfloat16 on
    CPUs that multiply it faster than float32, and float32 elsewhere.

    `method` is `standard`; `gram`, which iterates on the small G Gᵀ; `gram_float32`, which keeps that matrix in
    float32; or `auto`: the fastest that is safe in half precision, and in float32 where that is a CPU's default and no
    gradient is needed; `standard` in every other float32, and in float64 (`choose_iteration`).

    The result does not depend on `torch.autocast`. The norm overflows only above float64's largest number, a zero
    matrix gives zeros even with `eps` 0, and a NaN stays in its own matrix. On a CPU a matrix gets the same bits alone
    and in any batch.

    Raises TypeError for a DTensor and for anything but a tensor, for an eps that is no number, and for `ns_steps` that
    is no integer. Raises ValueError for fewer than two dimensions, for a sparse tensor, for a dtype that is none of
    `DTYPES` or that the device cannot multiply, for an eps that is negative or not finite, for an invalid schedule, for
    a method that is unknown or not safe in the dtype, and for a GPU that this build has no code for.
    Source: Jordan, Muon (2024); Amsel et al., The Polar Express, arXiv:2505.16932.
    """
    if not isinstance(G, Tensor):
        raise TypeError(f"orthogonalize needs a tensor, got {type(G).__name__}: write torch.as_tensor(...)")
    if is_dtensor(G):
        raise TypeError("orthogonalize needs a whole matrix, got a DTensor: write G.full_tensor(); Muon takes shards")
    if G.ndim < 2 or G.dtype not in DTYPES or G.layout != torch.strided:
        dtypes = ", ".join(map(str, DTYPES))
        raise ValueError(f"orthogonalize needs dense matrices (..., m, n) in one of {dtypes}, got {shown(G)}")
    if isinstance(eps, bool) or not isinstance(eps, Real):
        raise TypeError(f"eps must be a number, got {eps!r}")
    if not 0 <= eps <= sys.float_info.max:  # a whole number may be above all floats
        raise ValueError(f"eps must be at least 0 and finite, got {eps}")
    # A number that varies from call to call is a symbol while torch.compile traces, and this makes it a constant.
    is_number = isinstance(ns_steps, int) and not isinstance(ns_steps, bool)
    schedule = _schedule(ns_coefficients, operator.index(ns_steps) if is_number else ns_steps)
    work_dtype = check_work_dtype(dtype, G.device) or default_work_dtype(G)
    size = (min(G.shape[-2:]), max(G.shape[-2:]))
    circumstances = Circumstances(is_transformed(G), default_dtype=dtype is None)
    iteration = choose_iteration(G.device, work_dtype, size, schedule, method, circumstances)
    if G.numel() == 0:
        return G.clone()
    with without_autocast(G.device.type):
        factors = polar_factors(G.reshape(-1, *G.shape[-2:]), iteration, float(eps))
    return factors.to(G.dtype).reshape(G.shape)


def polar_factors(
    G: Tensor,
    iteration: Iteration,
    eps: float,
    out: Optional[Tensor] = None,
    norms: Optional[Tensor] = None,
    squares: Optional[Sequence[Tensor]] = None,
) -> Tensor:
    """Return the polar factors of a batch G (B, m, n), B at least 1, in the work dtype and without checks.

    They are written to `out`, of G's shape and the work dtype, if that is given: on a CPU with runs of memory along the
    longer side. `norms` (B,) are G's Frobenius norms, if the caller knows them; an iteration in one launch takes none.
    `squares`, as many tensors (b, m, m) as `Iteration.squares` says, is memory that it uses, if it is given: for as
    many matrices as are worked on together, or for all of them.
    `iteration_bytes` says how much memory this takes.
    """
    if chain_key(G.device, iteration) is not None:
        return _in_batches(Operand(G, iteration, eps, out, norms))
    tall = G.size(-2) > G.size(-1)
    wide = G.mT if tall else G
    wide = _by_rows(wide, iteration)
    single = iteration.one_at_a_time
    length = 1 if single else matrices_together(wide.device, wide.shape[-2:], iteration)
    if out is None and len(wide) <= length and not single:
        factors = _polar_factor(wide, iteration, eps, norm=broadcast_norms(norms))
        return factors.mT if tall else factors
    if out is None:
        order = torch.contiguous_format if wide.device.type == "cpu" else torch.preserve_format
        factors = torch.empty_like(wide, dtype=iteration.work_dtype, memory_format=order)
    else:
        factors = out.mT if tall else out
    through_copies = is_transformed(wide)  # autograd and vmap support a copy, but not a product with an `out` argument
    for start, end in even_pieces(len(wide), length):  # even: a rest of two matrices would take as long as a full piece
        # Products that take one matrix at a time take it as (m, n), without a batch dimension.
        X, target, norm = (
            x if x is None else x.select(0, start) if single else x.narrow(0, start, end - start)
            for x in (wide, factors, broadcast_norms(norms))
        )
        if through_copies:
            target.copy_(_polar_factor(X, iteration, eps, norm=norm))
        else:
            room = squares and tuple(x[0] if single else x[: end - start] for x in squares)
            _polar_factor(X, iteration, eps, target, norm, room)
    return factors.mT if tall else factors


def iteration_bytes(
    iteration: Iteration, device: torch.device, size: tuple[int, int], counts: tuple[int, int], dtype: torch.dtype
) -> int:
    """Return the most bytes that the iteration of m x n matrices works in, beside G of this dtype, `out` and squares.

    `size` is m, n with m <= n. `counts` are those of the matrices and of those that are worked on together.
    """
    (m, n), (count, together), work = size, counts, iteration.work_dtype.itemsize
    square = m * m * iteration.chain_dtype.itemsize
    if chain_key(device, iteration) is not None:
        # For all matrices: a copy; then what normalises it, or Gram matrices and products, rounded and made from a copy
        # in the chain's dtype. For those that are worked on together: the factors of a product.
        other = iteration.chain_dtype != iteration.work_dtype
        squares = 2 * square + (m * m * work + m * n * iteration.chain_dtype.itemsize if other else 0)
        return count * (m * n * work + max(squares, m * n * max(4, dtype.itemsize))) + together * 5 * square
    # A copy, and what normalises it, in float32 at least, or the Gram iteration's squares.
    squares = 0 if iteration.method == "standard" or iteration.squares[0] else 5
    return together * (m * n * work + max(squares * square, m * n * max(4, dtype.itemsize)))


def _in_batches(operand: Operand) -> Tensor:
    """Return the polar factors of an operand that shares no products, of as many matrices at once as are packed."""
    length = packed_together(operand.G.shape[-2:], operand.G.element_size())
    pieces = even_pieces(len(operand.G), length)
    if len(pieces) == 1:
        return chained_polar_factors([operand])[0]
    G, iteration, eps, out, norms = operand
    factors = []
    for start, end in pieces:
        target, norm = (x if x is None else x[start:end] for x in (out, norms))
        factors += chained_polar_factors([Operand(G[start:end], iteration, eps, target, norm)])
    return torch.cat(factors) if out is None else out


def _polar_factor(
    G: Tensor,
    iteration: Iteration,
    eps: float,
    out: Optional[Tensor] = None,
    norm: Optional[Tensor] = None,
    squares: Optional[Sequence[Tensor]] = None,
) -> Tensor:
    """Return the polar factors of wide G (..., m, n), written to `out` if that is given; `norm` is (..., 1, 1).

    `squares`, as many tensors (..., m, m) as `Iteration.squares` says, is memory for them, if it is given.
    """
    if iteration.in_one_launch:
        return small_polar.small_polar(G, iteration.gram_windows, iteration.scale, eps, iteration.work_dtype, out)
    windows, products = iteration.windows, iteration.products
    is_standard = iteration.method == "standard"
    place, *places = places_in_turn(out, len(windows[0] if is_standard else windows), products)
    arguments = G, iteration.work_dtype, eps, iteration.scale, norm, place
    # The normalised matrix is passed on, not kept in a variable: without `out`, the second step can use its memory.
    if is_standard:
        return newton_schulz(normalize(*arguments), windows[0], products, places, squares)
    return gram_newton_schulz(normalize(*arguments), windows, products, iteration.chain_dtype, places, squares)


def factor_of_parts(
    wide: Tensor, counts: Tensor, iteration: Iteration, eps: float
) -> Generator[Tensor, None, tuple[Tensor, Tensor]]:
    """Return some columns of the polar factors of wide matrices whose other columns other ranks have.

    `wide` (B, m, n_r) are this rank's columns. With X = [X_1 ... X_R], X Xᵀ is the sum of all X_r X_rᵀ, and the polar
    factor Q X has the columns Q X_r. So this generator yields each tensor that must be summed over all ranks; the
    caller sums it in place before the generator continues. First come squared norms and `counts` (B), float64; then,
    for each window of the Gram iteration, an m x m matrix, in float32 at least. The result is the columns (B, m, n_r)
    and the summed counts in float32.
    """
    wide = _by_rows(wide, iteration)
    sums = torch.stack([frobenius_norm(wide).flatten().square(), counts])
    yield sums
    squares, counts = sums
    X = normalize(wide, iteration.work_dtype, eps, iteration.scale, squares.sqrt().view(-1, 1, 1))
    del wide
    for window in iteration.windows:
        R = _each(iteration, partial(gram_matrix, products=iteration.products, chain_dtype=iteration.chain_dtype), X)
        R = R.to(torch.promote_types(R.dtype, torch.float32))
        yield R
        known = {"window": window, "products": iteration.products}
        Q = _each(iteration, partial(window_product, **known), R.to(iteration.chain_dtype))
        X = _each(iteration, partial(apply_window, **known), Q, X)
    return X, counts.float()


def _by_rows(wide: Tensor, iteration: Iteration) -> Tensor:
    """Return wide matrices; on a CPU with contiguous rows, because products sum other layouts in another order.

    The native passes, which come first, read any strides and write contiguous rows.
    """
    as_they_are = wide.device.type != "cpu" or native_passes_take(wide, iteration.work_dtype)
    if as_they_are:
        return wide
    # A matrix of one row counts as contiguous whatever its stride is, and torch's products look at that, too.
    return wide.clone(memory_format=torch.contiguous_format) if wide.size(-2) == 1 else wide.contiguous()


@constant_while_traced  # with dynamic shapes a tracer takes floats, too, for inputs of the graph
def _schedule(ns_coefficients: Union[str, Sequence], ns_steps: int) -> Schedule:
    return resolve_schedule(ns_coefficients, ns_steps)


def _each(iteration: Iteration, function: Callable[..., Tensor], *batches: Tensor) -> Tensor:
    """Return `function` of batches (B, m, n), called for one matrix of each at a time if the products take only one."""
    if iteration.products.batched:
        return function(*batches)
    return torch.stack([function(*matrices) for matrices in zip(*batches)])
