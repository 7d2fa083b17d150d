"""Calls of the compiled operations whose results have the same bits on every processor that can run them.

Inputs are made of random integers alone: torch draws other random numbers where its logarithm is another.
"""

from __future__ import annotations

import functools
import itertools
import platform
from collections.abc import Iterator

import torch
from torch import Tensor

FLOATS = torch.float32, torch.float64, torch.bfloat16, torch.float16
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SHAPE = 5, 900
# Instructions of `gemm_` in float32; a processor that has one of them has those before it, too.
FLOAT32 = "portable", "avx2", "avx512"


@functools.cache
def values(dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of all sizes, among them subnormal and infinite ones, zeros of both signs and NaN."""
    limits = torch.finfo(dtype)
    subnormal = limits.smallest_normal / 3
    special = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, limits.max, limits.smallest_normal, subnormal, -subnormal]
    chosen, rare = integers(len(special), seed + 100), integers(10, seed + 200) < 3
    return torch.where(rare, torch.tensor(special, dtype=dtype)[chosen], numbers(dtype, seed, exponents=30))


def numbers(dtype: torch.dtype, seed: int, exponents: int = 4, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Numbers of both signs, whose exponents are so many around 0."""
    sign, mantissa = integers(2, seed, shape), integers(1 << 52, seed + 1000, shape)
    exponent = integers(exponents, seed + 2000, shape) - exponents // 2 + 1023
    exact = (sign << 63 | exponent << 52 | mantissa).view(torch.float64)
    # From float64 to half precision torch rounds once on aarch64, and twice, by float32, on x86-64.
    return exact if dtype == torch.float64 else exact.float().to(dtype)


def integers(below: int, seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def bits(x: Tensor) -> Tensor:
    """The bits of `x`, those of NaN all the same: which NaN an operation gives is not promised."""
    return x.masked_fill(x.isnan(), torch.nan).contiguous().view(BITS[x.element_size()])


def packed(operations, dtypes, nesterov: bool) -> list[Tensor]:
    """Momentum and batch, for the dtypes of momentum, gradient and batch."""
    momentum, gradient = values(dtypes[0], 0).clone(), values(dtypes[1], 1)
    result = torch.zeros(1, *SHAPE, dtype=dtypes[2])
    scale = torch.tensor(3.0)
    operations.momentum_pack_([momentum], [gradient], result, 0.95, nesterov, grad_scale=scale)
    return [bits(momentum), bits(result)]


def packed_in_8_bits(operations, dtypes, nesterov: bool) -> list[Tensor]:
    """Codes, scales and batch, for the dtypes of gradient and batch."""
    gradient, result = values(dtypes[0], 1), torch.zeros(1, *SHAPE, dtype=dtypes[1])
    codes, scale = torch.zeros(SHAPE, dtype=torch.int8), torch.zeros(SHAPE[0], -(-SHAPE[1] // 64))
    for step_gradient in gradient.nan_to_num(1.0, 2.0, -2.0), gradient:  # so that there is an average when it comes
        operations.momentum_pack_([codes], [step_gradient], result, 0.95, nesterov, momentum_scale=[scale])
    return [codes.view(torch.uint8), bits(scale), bits(result)]


def descended(operations, dtypes, decay_mode: int, halves: bool = False, **options) -> list[Tensor]:
    """Parameter and remainder, for the dtypes of parameter and update."""
    parameter, update = values(dtypes[0], 0).clone(), values(dtypes[1], 1)
    remainder = (integers(1 << 16, 2) - (1 << 15)).to(torch.int16)
    options |= {"remainder": [remainder]} if halves else {}
    scalars = [torch.tensor(x, dtype=torch.float64) for x in (0.02, 0.1, 1.5)]
    operations.descend_(
        [parameter], update[None], *scalars, decay_mode, row_scale=torch.full(SHAPE[:1], 0.7), **options
    )
    return [bits(parameter), remainder]


def descended_with_norms(operations, dtype: torch.dtype) -> list[Tensor]:
    """The norms of updates that a parameter descends by, which lie by rows, and by columns."""
    norms, scalars = torch.zeros(2, 1, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    by_rows = numbers(dtype, 9, shape=(1, 83, 77))
    for norm, update in zip(norms, (by_rows, by_rows.mT.contiguous().mT)):
        operations.descend_([torch.zeros(83, 77)], update, *scalars, 0, norms=norm)
    return [bits(norms)]


def ways_to_descend(dtype: torch.dtype) -> list[dict]:
    """The options of `descended` that parameters of `dtype` can have."""
    seeded = [{"seeds": torch.tensor([5])}] if dtype.itemsize == 2 else []
    return [{}, *seeded, *([{"halves": True}] if dtype == torch.bfloat16 else [])]


def packed_by_columns(operations, dtype: torch.dtype) -> list[Tensor]:
    """A matrix by rows packed into one by columns; its sizes are no multiples of what is transposed in registers."""
    momentum, gradient = (numbers(dtype, seed, shape=(77, 83)) for seed in (8, 9))
    columns = torch.zeros(1, 83, 77, dtype=dtype)
    operations.momentum_pack_([momentum], [gradient], columns.mT, 0.95, True)
    return [bits(momentum), bits(columns)]


def packed_with_norms(operations, dtype: torch.dtype) -> list[Tensor]:
    """The norms of a matrix by rows that is packed into one by rows, and into one by columns."""
    momentum, gradient = (numbers(torch.float32, seed, shape=(83, 77)) for seed in (8, 9))
    norms, rows = torch.zeros(2, 1, dtype=torch.float64), torch.zeros(1, 83, 77, dtype=dtype)
    for norm, result in zip(norms, (rows, torch.zeros(1, 77, 83, dtype=dtype).mT)):
        operations.momentum_pack_([momentum], [gradient], result, 0.95, True, norms=norm)
    return [bits(norms)]


def moved(operations, dtype: torch.dtype) -> list[Tensor]:
    """A buffer with two blocks of a batch, and a batch with these blocks of it."""
    matrices, buffer = values(dtype, 3)[None].clone(), torch.zeros(1000, dtype=dtype)
    # count, position, top, left, rows, cols, offset, step, row_step: `plan.blocks.Block`
    blocks = torch.tensor([[1, 0, 0, 3, 2, 100, 0, 0, 100], [1, 0, 2, 500, 3, 250, 250, 0, 250]])
    operations.move_blocks_(matrices, buffer, blocks, True)
    back = torch.zeros_like(matrices)
    operations.move_blocks_(back, buffer, blocks, False)
    return [bits(buffer), bits(back)]


def normalized(operations, dtype: torch.dtype) -> list[Tensor]:
    """Norms of a batch, and the batch divided by them."""
    X = numbers(dtype, 4)[None]
    norms, out = torch.zeros(1, dtype=torch.float64), torch.zeros_like(X)
    operations.frobenius_norm_(norms, X)
    operations.normalize_(out, X, norms, 1e-7, 8.0)
    return [bits(norms), bits(out)]


def multiplied(operations, dtype: torch.dtype, instructions: str, symmetric: bool) -> list[Tensor]:
    """A X + B X of matrices whose sizes are no multiples of a block's, or of a matrix and its transpose."""
    A = numbers(dtype, 5, shape=(2, 100, 300))
    B = A.mT if symmetric else numbers(dtype, 6, shape=(2, 300, 70))
    D = None if symmetric else numbers(dtype, 7, shape=(2, 100, 70))
    C = torch.zeros(2, 100, B.size(2), dtype=dtype)
    operations.gemm_(C, A, B, D, 1.5, 0.5, symmetric, instructions)
    return [bits(C)]


def iterated(operations, dtype: torch.dtype, instructions: str) -> list[Tensor]:
    """Matrices after two steps of the iteration."""
    X = numbers(dtype, 8, shape=(3, 50, 110)) / 128
    A, B = torch.zeros(2, 3, 50, 50, dtype=dtype)
    operations.newton_schulz_(X, A, B, [3.4445, -4.775, 2.0315] * 2, True, instructions)
    return [bits(X)]


def iterated_with_float32_squares(operations, instructions: str) -> list[Tensor]:
    """bfloat16 matrices after two steps of the Gram iteration, whose squares have these instructions."""
    X, squares = numbers(torch.bfloat16, 8, shape=(3, 50, 110)) / 128, torch.zeros(4, 2, 50, 50)
    steps = [3.4445, -4.775, 2.0315] * 2
    operations.gram_newton_schulz_(X, *squares, steps, [2], True, "portable", instructions)
    return [bits(X)]


def multiplied_in_float32(operations) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the products by each of this processor's instructions; the portable ones round otherwise on ARM."""
    best = operations.gemm_instructions(torch.float32)
    for instructions in FLOAT32[: FLOAT32.index(best) + 1]:
        where = f", {platform.machine()}" if instructions == "portable" else ""
        products = (multiplied(operations, torch.float32, instructions, symmetric) for symmetric in (True, False))
        yield f"gemm_ in float32, {instructions}{where}", _all(products)
        yield f"newton_schulz_ in float32, {instructions}{where}", iterated(operations, torch.float32, instructions)
        squares = iterated_with_float32_squares(operations, instructions)
        yield f"gram_newton_schulz_ in bfloat16, float32 squares, {instructions}{where}", squares


def results(operations) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the results of every operation that runs on CPUs, with its name, for all dtypes and options."""
    yield "inputs", [bits(values(dtype, seed)) for dtype in FLOATS for seed in (0, 1, 3)]
    triples, pairs = itertools.product(FLOATS, repeat=3), itertools.product(FLOATS, repeat=2)
    switch = True, False
    yield "momentum_pack_", _all(packed(operations, *way) for way in itertools.product(triples, switch))
    ways = list(itertools.product(pairs, switch))
    yield "momentum_pack_, 8 bits", _all(packed_in_8_bits(operations, *way) for way in ways)
    yield "momentum_pack_, transposed", _all(packed_by_columns(operations, dtype) for dtype in FLOATS)
    singles = [dtype for dtype in FLOATS if dtype != torch.float64]
    yield "momentum_pack_, norms", _all(packed_with_norms(operations, dtype) for dtype in singles)
    ways = [(dtypes, mode, how) for dtypes, _ in ways[::2] for mode in range(3) for how in ways_to_descend(dtypes[0])]
    yield "descend_", _all(descended(operations, dtypes, mode, **how) for dtypes, mode, how in ways)
    yield "descend_, norms", _all(descended_with_norms(operations, dtype) for dtype in singles)
    yield "move_blocks_", _all(moved(operations, dtype) for dtype in FLOATS)
    yield "frobenius_norm_, normalize_", _all(normalized(operations, dtype) for dtype in singles)
    products = (multiplied(operations, torch.bfloat16, "portable", symmetric) for symmetric in switch)
    yield "gemm_ in bfloat16, portable", _all(products)
    yield "newton_schulz_ in bfloat16, portable", iterated(operations, torch.bfloat16, "portable")
    yield from multiplied_in_float32(operations)


def _all(lists) -> list[Tensor]:
    return list(itertools.chain.from_iterable(lists))
