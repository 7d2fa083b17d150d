"""Laws of the symmetric product's Triton kernel, in Triton's interpreter and on a GPU.

Tiles are smaller than any that is shipped, so that small matrices have many.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.symmetric_products import (
    ALPHA,
    BETA,
    DIAGONAL,
    DTYPES,
    LAYOUTS,
    Launch,
    check_product,
    every_other,
    normal,
    operands,
    product,
    prove_product,
    symmetric,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("place")

SIZES = [(1, 7), (7, 1), (33, 65), (65, 33)]
LARGE = [(127, 65), (65, 200)]
NUMBERS = ALPHA, BETA, DIAGONAL
# Whether there is a D, and the coefficients.
EPILOGUES = {
    "product": (False, (1.0, 0.0, 0.0)),
    "sum": (True, NUMBERS),
    "diagonal": (False, (ALPHA, 0.0, DIAGONAL)),
}

TILES = pytest.mark.parametrize("small", [1, 2], indirect=True, ids=["one tile", "two tiles"])
# Two tiles differ from one in the places that they read and write, whatever the dtype.
TILES_AND_DTYPES = pytest.mark.parametrize(
    "small, dtype", [*((1, dtype) for dtype in DTYPES), (2, torch.float16)], indirect=["small"], ids=str
)


@pytest.fixture
def module(kernel):
    return kernel.kernels.gpu.symmetric_gemm


@pytest.fixture
def small(request, module, tuned, monkeypatch):
    """A configuration of tiles of 32: a program computes so many beside each other, 1 unless the test says 2."""
    monkeypatch.setattr(module, "LARGEST_TILE", 32)
    return tuned.Config(tile=32 * getattr(request, "param", 1), tile_k=32, group=2, warps=4, stages=2)


def launching(module, config) -> Launch:
    """Return launches with one configuration."""
    return lambda A, B, D, C, scalars: module.launch_symmetric_gemm(A, B, D, C, scalars, config)


@pytest.fixture
def compute(module, small) -> Callable[..., Tensor]:
    """The kernel's product in small tiles, in a result that held NaN."""
    return partial(product, launching(module, small))


@TILES_AND_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_err_by_their_roundings(compute, dtype, layout):
    cases = [*itertools.product(SIZES, EPILOGUES, [1]), *itertools.product(LARGE, ["sum"], [1])]
    for (m, k), epilogue, batch in [*cases, ((33, 7), "sum", 3)]:
        A, B = operands(layout, batch, m, k, dtype)
        has_D, scalars = EPILOGUES[epilogue]
        D = symmetric(batch, m, dtype, seed=9) if has_D else None
        D = every_other(D) if has_D and layout == "sliced" else D
        check_product(compute(A, B, D, scalars), A, B, D, scalars)


@pytest.mark.every_run
@TILES_AND_DTYPES
def test_proof_finds_nothing_wrong(place, module, small, dtype):
    prove_product(launching(module, small), dtype, place.sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_safe_configuration_computes_the_product(place, module, tuned, dtype):
    choices = itertools.product(place.targets(tuned), (130, 2000), (False, True), (False, True))
    A, B = operands("contiguous", 1, 130, 70, dtype)
    D = symmetric(1, 130, dtype)
    for config in {tuned.safe_config(target, dtype, *choice) for target, *choice in choices}:
        check_product(product(launching(module, config), A, B, D, NUMBERS), A, B, D, NUMBERS)


def test_the_result_alone_is_rounded(compute):
    """300 ** 2 is more than float16 holds, half of it is not."""
    A = torch.full((1, 1, 1), 300.0, dtype=torch.float16)
    assert compute(A, A, A, (0.5, -200.0, 0.0)) == -15000
    assert compute(A, A, None, (1.0, 0.0, -45000.0)) == 45000


@TILES
@pytest.mark.parametrize("m", [1, 7, 33, 65])
def test_every_entry_is_written_and_nothing_around_it(compute, m):
    A, B = operands("contiguous", 2, m, 20, torch.float32)
    buffer = torch.full((4, 2 * m + 5, 3 * m + 4), 7.0)
    for C in buffer[1:3, 1 : 2 * m + 1 : 2, 2 : 3 * m + 2 : 3], buffer[1:3, 1 : m + 1, 2 : m + 2].mT:
        buffer.fill_(7.0)
        assert compute(A, B, C=C).isfinite().all()
        C.fill_(7.0)
        assert (buffer == 7.0).all()


@TILES
@pytest.mark.parametrize("m, k", [(1, 7), (33, 7), (40, 33)])
def test_nothing_is_read_behind_an_operand(place, compute, m, k):
    X, D = normal(2, m, k), symmetric(2, m)
    A, B, addend = (place.guarded(x) for x in (X, X.mT, D))
    for left, right in (A, B), (B.mT, A.mT):
        assert torch.equal(compute(left, right, addend, NUMBERS), compute(X, X.mT, D, NUMBERS))


@TILES_AND_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_is_symmetric_bit_for_bit(compute, dtype, layout):
    A, B = operands(layout, 2, 70, 45, dtype)
    C = compute(A, B, symmetric(2, 70, dtype), NUMBERS)
    assert torch.equal(C, C.mT)


@TILES
def test_a_matrix_gets_the_same_bits_alone_and_in_a_batch(compute):
    A, B = operands("polynomials", 3, 70, 70, torch.float32)
    D = symmetric(3, 70, seed=9)
    together = compute(A, B, D, NUMBERS)
    for n in range(3):
        one = slice(n, n + 1)
        assert torch.equal(compute(A[one], B[one], D[one], NUMBERS), together[one])


@pytest.mark.parametrize("layout", ["transposed", "sliced", "misaligned"])
def test_strides_do_not_change_a_bit(compute, layout):
    """Of sums that are exact: by descriptors and by pointers a GPU may multiply in other instructions."""
    (A, B), (X, Y) = (operands(name, 2, 70, 45, torch.float32) for name in (layout, "contiguous"))
    for x in (A, X):
        x.mul_(16).round_()
    D = symmetric(2, 70)
    C = every_other(torch.zeros_like(D))
    assert torch.equal(compute(A, B, every_other(D), NUMBERS, C), compute(X, Y, D, NUMBERS))


@TILES
@pytest.mark.parametrize("group", [1, 3, 8])
def test_the_order_of_the_tiles_does_not_change_a_bit(module, small, compute, group):
    A, B = operands("contiguous", 2, 130, 33, torch.float32)
    assert torch.equal(product(launching(module, small._replace(group=group)), A, B), compute(A, B))


def test_a_sum_of_no_terms_leaves_the_addend(compute):
    """Its products with beta are exact, so a fused multiply-add, as on a GPU, rounds as a sum of them does."""
    A, D = torch.empty(2, 40, 0), symmetric(2, 40).bfloat16().float()
    beta, diagonal = -4.75, 3.5
    assert torch.equal(compute(A, A.mT, D, (ALPHA, beta, diagonal)), beta * D + diagonal * torch.eye(40))
    assert torch.equal(compute(A, A.mT), torch.zeros(2, 40, 40))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (0, 0, 0)], ids=str)
def test_no_matrices_and_no_rows_are_no_work(compute, shape):
    A = torch.empty(shape)
    assert compute(A, A.mT).shape == (shape[0], shape[1], shape[1])


@TILES_AND_DTYPES
def test_descriptors_and_pointers_give_the_same_bits(place, module, compute, dtype, monkeypatch):
    """Operands are whole numbers: their sums are exact, in whatever order they are added."""
    if place.device == "cuda" and not module.reads_descriptors(torch.device("cuda")):
        pytest.skip("this GPU reads by pointers alone")
    X = normal(2, 72, 40, dtype=dtype).mul_(16).round_()
    Y = X.mT.contiguous().mT
    pairs = [(X, X.mT), (Y, Y.mT), (X, Y.mT), (X[:, :33], X[:, :33].mT), (X[1:, :, :33], X[1:, :, :33].mT)]
    seen, describe = [], module._describe
    monkeypatch.setattr(module, "_describe", lambda *args: seen.append(args) or describe(*args))
    monkeypatch.setattr(module, "reads_descriptors", lambda device: False)
    by_pointers = [compute(A, B) for A, B in pairs]
    assert not seen
    monkeypatch.setattr(module, "reads_descriptors", lambda device: True)
    assert all(torch.equal(compute(A, B), C) for (A, B), C in zip(pairs, by_pointers))
    assert len(seen) == 2 * len(pairs)


# Places past 2**31 elements, along each dimension in turn: shape, strides in elements.
FAR = {
    "batch": ((2, 5, 5), (2**31, 5, 1)),
    "rows": ((1, 33, 33), (0, 2**26, 1)),
    "columns": ((1, 33, 33), (0, 1, 2**26)),
}


@TILES
@pytest.mark.parametrize("tile_k", [32, 64], ids=["in steps", "in one step"])
@pytest.mark.parametrize("far", FAR)
def test_offsets_need_more_than_31_bits(place, module, small, far, tile_k):
    shape, strides = FAR[far]
    A, D, C = (place.sparse(2**31 + 2**21).as_strided(shape, strides) for _ in range(3))
    X = A.copy_(normal(*shape).mul_(16).round_()).contiguous()
    Y = D.copy_(symmetric(*shape[:2])).contiguous()
    launch = launching(module, small._replace(tile_k=tile_k))
    assert torch.equal(product(launch, A, A.mT, D, NUMBERS, C), product(launch, X, X.mT, Y, NUMBERS))
