"""What a step of four models launches, moves and waits for, by their shapes: the counts behind docs/predictions.md.

Bounds on launches are made from shapes, from the bytes that may be packed together, and from the model of products.
They ask nothing of the plan but which method a shape has, so they find a plan that batches less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from benchmarks.fake_gpu import GPU, MATRICES, Work, counted_step, fake_gpu, fake_optimizer
from benchmarks.shapes import MODELS, matrix_counts
from benchmarks.sweep_fake_step import USUAL
from tests.support.inside import plan_of

pytest.importorskip("triton")

STEPS, WINDOWS = 5, 2
FULL, HALF = 4, 2  # bytes of an element, in float32 and float16
# AdamW's launch, and that which counts its steps.
ADAMW, ADAMW_BYTES = 2, 28
# A matrix's element is read as gradient, momentum, packed direction and parameter, and written as the last three, in
# float32. As a normalised element and as one of the update it is written and read in float16, once as a pass each.
PASSES_BYTES = 7 * FULL + 2 * HALF
# A chain's graph writes factors, and what normalises is inside of it.
REPLAYED_BYTES = PASSES_BYTES - FULL
# How many launches a replayed step may have, whatever its batches are: what whole batches and graphs were built for.
GOALS = {"llama-1b": 100}
# Norms and counts of steps: a few numbers of at most eight bytes for each parameter.
SMALL = 64


class Size(NamedTuple):
    """Matrices of one shape, m <= n, that are orthogonalized by one method."""

    count: int
    m: int
    n: int
    method: str
    packed: int  # how many are packed together at most

    @property
    def batches(self) -> list[int]:
        """The numbers of matrices in as few even batches as they fit into."""
        few = -(-self.count // self.packed)
        return [(i + 1) * self.count // few - i * self.count // few for i in range(few)]


def step_of(kernel, model: str, way: str) -> tuple[Work, list[Size]]:
    """A counted step of a model, and its matrices' sizes."""
    limit = kernel.polar.packing.BATCH_BYTES
    with fake_gpu(kernel, way):
        optimizer = fake_optimizer(kernel, MODELS[model])
        work = counted_step(optimizer)
    iterations = {(m.rows, m.cols): batch.iteration for batch in plan_of(optimizer).batches for m in batch.matrices}
    assert all(len(each.windows) == (1 if each.method == "standard" else WINDOWS) for each in iterations.values())
    sizes = [
        Size(count, *sorted(shape), iterations[shape].method, max(1, limit // (shape[0] * shape[1] * FULL)))
        for shape, count in matrix_counts(MODELS[model]).items()
    ]
    return work, sizes


def most_launches(kernel, sizes: list[Size], way: str) -> int:
    """Launches of a step if each size comes in its batches, and if squares come as many at once as the model says.

    Momentum and descent have one for so many matrices, and another that takes roots of norms. In the standard iteration
    each piece of a batch is divided by its norms and multiplied three times a step. In the Gram iteration a batch is
    divided once, and has two long products in each window; squares are multiplied 4 s - 3 times in a window of s steps.
    For each step torch's products need two more: the addend's copy, and the sum on the diagonal.
    """
    launches, chained = ADAMW, defaultdict(list)
    beside = 2 * STEPS if way == "torch" else 0
    for size in sizes:
        launches += sum(2 * -(-batch // MATRICES) + 2 for batch in size.batches)
        if size.method == "standard":
            launches += sum(pieces(kernel, batch, size.m, way) * (1 + 3 * STEPS + beside) for batch in size.batches)
        else:
            launches += len(size.batches) * (1 + 2 * WINDOWS)
            chained[size.m].append(size)
    for m, members in chained.items():
        counts = [batch for size in members for batch in size.batches]
        if sum(size.count * size.m * size.n * FULL for size in members) <= kernel.polar.packing.BATCH_BYTES:
            counts = [sum(counts)]  # all share one chain
        launches += sum(pieces(kernel, count, m, way) for count in counts) * (4 * STEPS - 3 * WINDOWS + beside)
    return launches


def pieces(kernel, count: int, m: int, way: str) -> int:
    """In how many pieces squares are multiplied: full rounds of the compiled product, or full waves of the others."""
    predictions = kernel.kernels.speeds.predictions
    gpu = predictions.Gpu(*GPU)
    most = predictions.matrices_together(gpu, m, HALF)
    if way == "compiled":
        return -(-count // predictions.in_whole_rounds(gpu, m, most))
    return -(-count // predictions.in_full_waves(gpu, m, most, way == "symmetric"))


def product_bytes(size: Size, way: str) -> int:
    """Bytes that one matrix's products read and write in half precision; what a product reads twice counts once.

    X Xᵀ and Q X move 2 m n + 2 (m n + m²) / 2 each, a polynomial of A reads that and writes another, and torch's also
    reads the copy of its addend. A B moves three squares, and A B A is two such products.
    """
    square, long = size.m**2, size.m * size.n
    polynomials = STEPS * (3 if way == "torch" else 2) * square
    applied = (long + square) + (2 * long + square)
    if size.method == "standard":
        return HALF * (polynomials + STEPS * applied)
    return HALF * (polynomials + WINDOWS * applied + (STEPS - WINDOWS) * 3 * 3 * square)


def pass_bytes(sizes: list[Size], rest: int, way: str) -> int:
    """Bytes that a step moves beside its products; the copy of an addend and the sum on a diagonal read and write."""
    elements = sum(size.count * size.m * size.n for size in sizes)
    beside = sum(size.count * STEPS * 2 * HALF * (size.m**2 + size.m) for size in sizes) if way == "torch" else 0
    return (REPLAYED_BYTES if way == "replayed" else PASSES_BYTES) * elements + ADAMW_BYTES * rest + beside


def check_bytes(work: Work, model: str, sizes: list[Size], way: str) -> None:
    """Each pass and product moves what its formula says, but for a few numbers of each parameter."""
    rest = sum(p.elements for p in MODELS[model] if not p.matrix)
    products = 0 if way == "replayed" else sum(size.count * product_bytes(size, way) for size in sizes)
    assert work.bytes_of_products == products
    assert 0 <= work.bytes - work.bytes_of_products - pass_bytes(sizes, rest, way) <= SMALL * len(MODELS[model])


def with_slow(names: Sequence[str], slow: Sequence[str]) -> list:
    """Parameters, of which some take seconds: torch looks at each operation on fake tensors."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


@pytest.mark.parametrize("way", ["torch", "symmetric", "compiled"])
@pytest.mark.parametrize("model", with_slow(USUAL, USUAL[1:]))
def test_a_step_launches_what_its_batches_need_and_moves_what_its_formulas_say(kernel, model, way):
    work, sizes = step_of(kernel, model, way)
    assert not work.syncs
    assert sum(work.kernels.values()) <= most_launches(kernel, sizes, way)
    check_bytes(work, model, sizes, way)


@pytest.mark.parametrize("model", with_slow(USUAL, ["moe-64", "llama-8b"]))
def test_a_replayed_step_launches_a_graph_for_a_batch_and_its_passes(kernel, model):
    """At most: batches that share a chain share its graph."""
    work, sizes = step_of(kernel, model, "replayed")
    launches = sum(work.kernels.values())
    assert not work.syncs
    assert launches <= ADAMW + sum(2 * -(-batch // MATRICES) + 3 for size in sizes for batch in size.batches)
    assert launches <= GOALS.get(model, launches)
    check_bytes(work, model, sizes, "replayed")
