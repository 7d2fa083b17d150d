"""All products of an iteration in one call, on a CPU: the bits of one product after another, whoever does what."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple, Optional

import pytest
import torch
from torch import Tensor

from tests.support.gemm_kinds import BFLOAT16, FLOAT32, KINDS, Kind, name_of, skip_unless_here

STEPS = ((4.0848, -6.8946, 2.927), (-3.9505, 6.3029, -2.6377), (0.0, -1.5, 0.5))
COEFFICIENTS = [number for step in STEPS for number in step]
# (b, m, n): parts of a block, whole ones, more than one go along n, more columns than are packed at once.
SHAPES = (5, 17, 33), (3, 64, 96), (4, 33, 700), (7, 96, 64), (2, 40, 9000), (1, 5, 1)


class Way(NamedTuple):
    """An iteration, with instructions: the Gram iteration with these windows, or the standard one without."""

    kind: Kind
    windows: Optional[tuple[int, ...]]
    square_instructions: str

    def squares(self, rooms: int, m: int) -> list[Tensor]:
        """Return room for its squares, filled with NaN."""
        count, dtype = (2, self.kind.dtype) if self.windows is None else (4, FLOAT32)
        return [torch.full((rooms, m, m), torch.nan, dtype=dtype) for _ in range(count)]


@pytest.fixture(params=KINDS, ids=name_of)
def kind(request, native) -> Kind:
    """Each instruction set that is here."""
    skip_unless_here(native, request.param)
    return request.param


@pytest.fixture(params=[None, (3,), (1, 2), (2, 1)], ids=str)
def way(request, kind, native) -> Way:
    """Each iteration with each instruction set; squares have the best for float32."""
    return Way(kind, request.param, native.gemm_instructions(FLOAT32))


@pytest.fixture
def threads():
    """Set the number of threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def normalized(kind: Kind, *shape: int) -> Tensor:
    X = kind.random(*shape).float()
    return (X / torch.linalg.matrix_norm(X, keepdim=True)).to(kind.dtype)


def step_by_step(native, X: Tensor, way: Way) -> Tensor:
    """What the contract says, by products of `gemm_`."""
    X, instructions = X.clone(), way.kind.instructions
    if way.windows is None:
        for a, b, c in STEPS:
            A = product(native, X, X.mT, instructions, X.dtype)
            B = product(native, A, A, instructions, X.dtype, (c, b))
            native.gemm_(X, B, X, X if a else None, 1.0, a, False, instructions)
        return X
    ends = list(accumulate(way.windows))
    for start, end in zip([0, *ends], ends):
        R, a = product(native, X, X.mT, instructions, FLOAT32), 0.0
        steps = STEPS[start:end]
        if len(steps) == 1:  # which adds a X itself
            a, steps = steps[0][0], [(0.0, *steps[0][1:])]
        Q = product_of_steps(native, R, steps, way.square_instructions)
        native.gemm_(X, Q.to(X.dtype), X, X if a else None, 1.0, a, False, instructions)
    return X


def product(native, A: Tensor, B: Tensor, instructions: str, dtype: torch.dtype, scalars=(1.0, 0.0)) -> Tensor:
    """Return alpha A B + beta A, symmetric."""
    C = torch.empty(len(A), A.size(1), A.size(1), dtype=dtype)
    native.gemm_(C, A, B, A if scalars[1] else None, *scalars, True, instructions)
    return C


def product_of_steps(native, R: Tensor, steps, instructions: str) -> Tensor:
    Q = None
    for number, (a, b, c) in enumerate(steps, 1):
        H = product(native, R, R, instructions, FLOAT32, (c, b))
        H.diagonal(dim1=-2, dim2=-1).add_(a)
        Q = H if Q is None else product(native, Q, H, instructions, FLOAT32)
        if number < len(steps):
            R = product(native, H, product(native, R, H, instructions, FLOAT32), instructions, FLOAT32)
    return Q


def in_one_call(native, X: Tensor, way: Way, rooms: int, alone: bool) -> Tensor:
    """The operation on a copy of X."""
    X = X.clone()
    overwrite(native, X, way, rooms, alone)
    return X


def overwrite(native, X: Tensor, way: Way, rooms: int, alone: bool, coefficients=COEFFICIENTS) -> None:
    squares, instructions = way.squares(rooms, X.size(1)), way.kind.instructions
    if way.windows is None:
        native.newton_schulz_(X, *squares, coefficients, alone, instructions)
    else:
        windows = way.windows if coefficients else []
        native.gram_newton_schulz_(X, *squares, coefficients, windows, alone, instructions, way.square_instructions)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_bits_are_those_of_one_product_after_another(native, way, shape, count, threads):
    """With fewer rooms than threads, as many, and more; with matrices left over for all threads, and without."""
    threads(count)
    X = normalized(way.kind, *shape)
    expected = step_by_step(native, X, way)
    for rooms in {1, count, len(X)}:
        for alone in True, False:
            assert torch.equal(in_one_call(native, X, way, rooms, alone), expected)


def test_a_matrix_that_a_thread_has_to_itself_has_the_same_bits(native, way, threads):
    """So many and so large that each of two threads takes some whole."""
    threads(2)
    X = normalized(way.kind, 5, 128, 256)
    expected = step_by_step(native, X, way)
    assert torch.equal(in_one_call(native, X, way, 2, True), expected)
    assert torch.equal(in_one_call(native, X[3:4], way, 2, True), expected[3:4])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_share_the_rounding_of_large_squares(native, threads, count):
    """A square of 200 rows has elements for one thread, and for a part of another one."""
    threads(count)
    kind = Kind(BFLOAT16, native.gemm_instructions(BFLOAT16), BFLOAT16)
    X, way = normalized(kind, 3, 200, 208), Way(kind, (1, 2), native.gemm_instructions(FLOAT32))
    expected = step_by_step(native, X, way)
    assert all(torch.equal(in_one_call(native, X, way, 3, alone), expected) for alone in (True, False))


def test_squares_are_multiplied_with_the_instructions_that_are_named(native, kind):
    """Sums of float32 have other bits with portable instructions, which add products that are rounded before."""
    X, ways = normalized(kind, 2, 40, 90), [Way(kind, (3,), name) for name in ("portable", "avx2")]
    if native.gemm_instructions(FLOAT32) == "portable":
        pytest.skip("this processor has no others")
    results = [in_one_call(native, X, way, 2, True) for way in ways]
    assert all(torch.equal(result, step_by_step(native, X, way)) for result, way in zip(results, ways))
    assert kind.dtype != FLOAT32 or not torch.equal(*results)


def test_rows_and_matrices_may_lie_apart(native, way):
    wide = torch.cat([normalized(way.kind, 6, 40, 70)] * 2, 2)
    X, between = wide[::2, :, :70], wide[1::2].clone()
    expected = step_by_step(native, X, way)
    overwrite(native, X, way, 2, True)
    assert torch.equal(X, expected) and torch.equal(wide[1::2], between)
    assert torch.equal(wide[::2, :, 70:], normalized(way.kind, 6, 40, 70)[::2])


def test_a_nan_stays_in_its_matrix(native, way):
    X = normalized(way.kind, 5, 64, 96)
    clean = in_one_call(native, X, way, 5, True)
    X[1, 3, 5] = torch.nan
    spoiled = in_one_call(native, X, way, 5, True)
    assert spoiled[1].isnan().all()
    assert torch.equal(spoiled[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


def test_without_steps_or_matrices_nothing_happens(native, way):
    X = normalized(way.kind, 2, 8, 12)
    before = X.clone()
    overwrite(native, X, way, 1, True, [])
    assert torch.equal(X, before)
    overwrite(native, X[:0], way, 0, True)
    for rows, cols in (8, 0), (0, 8):
        overwrite(native, torch.empty(3, rows, cols, dtype=way.kind.dtype), way, 1, True)


@pytest.mark.parametrize("method", ["standard", "gram_float32"])
def test_a_compiled_iteration_is_the_eager_one(kernel, method):
    """The iterations call them where products are compiled, and only there; X gets the result."""
    schedule, steps = kernel.schedules.resolve_schedule("polar_express", 5), kernel.kernels.newton_schulz
    X = normalized(Kind(BFLOAT16, "", BFLOAT16), 3, 40, 70)

    products = kernel.kernels.products.cpu_tables(BFLOAT16)["NATIVE" if method == "standard" else "NATIVE_GRAM"]

    def iterate(X, products=products):
        if method == "standard":
            return steps.newton_schulz(X, schedule, products)
        return steps.gram_newton_schulz(X, (schedule[:1], schedule[1:]), products, FLOAT32)

    one_by_one = products._replace(newton_schulz=None, gram_newton_schulz=None)
    expected = iterate(X.clone(), products=one_by_one)
    assert torch.equal(torch.compile(iterate, fullgraph=True, backend="aot_eager")(X.clone()), expected)
    assert iterate(X) is X and torch.equal(X, expected)
