"""All products of an iteration in one call, on a CPU: the bits of one product after another, whoever does what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.gemm_kinds import BFLOAT16, KINDS, SETS, Kind

STEPS = ((4.0848, -6.8946, 2.927), (3.9505, -6.3029, 2.6377), (0.0, -1.5, 0.5))
COEFFICIENTS = [number for step in STEPS for number in step]
# (b, m, n): parts of a block, whole ones, more than one go along n, more columns than are packed at once.
SHAPES = (5, 17, 33), (3, 64, 96), (4, 33, 700), (7, 96, 64), (2, 40, 9000), (1, 5, 1)


@pytest.fixture(scope="session")
def native(kernel):
    return kernel.kernels.native


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind.dtype}-{kind.instructions}".replace("torch.", ""))
def kind(request, native) -> Kind:
    """Each instruction set that is here."""
    dtype, name = request.param
    if SETS[dtype].index(name) < SETS[dtype].index(native.gemm_instructions(dtype)):
        pytest.skip(f"this processor has no {name}")
    return request.param


@pytest.fixture
def threads():
    """Set the number of threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def normalized(kind: Kind, *shape: int) -> Tensor:
    X = kind.random(*shape).float()
    return (X / torch.linalg.matrix_norm(X, keepdim=True)).to(kind.dtype)


def step_by_step(native, X: Tensor, instructions: str) -> Tensor:
    """What the contract says: three products for each step."""
    X, A = X.clone(), X.new_empty(len(X), X.size(1), X.size(1))
    B = torch.empty_like(A)
    for a, b, c in STEPS:
        native.gemm_(A, X, X.mT, None, 1.0, 0.0, True, instructions)
        native.gemm_(B, A, A, A, c, b, True, instructions)
        native.gemm_(X, B, X, X if a else None, 1.0, a, False, instructions)
    return X


def in_one_call(native, X: Tensor, instructions: str, rooms: int, alone: bool) -> Tensor:
    """The operation on a copy of X, with rooms that are filled with NaN before."""
    X = X.clone()
    A, B = (torch.full((rooms, X.size(1), X.size(1)), torch.nan, dtype=X.dtype) for _ in range(2))
    native.newton_schulz_(X, A, B, COEFFICIENTS, alone, instructions)
    return X


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_bits_are_those_of_one_product_after_another(native, kind, shape, count, threads):
    """With fewer rooms than threads, as many, and more; with matrices left over for all threads, and without."""
    threads(count)
    X = normalized(kind, *shape)
    expected = step_by_step(native, X, kind.instructions)
    for rooms in {1, count, len(X)}:
        for alone in True, False:
            assert torch.equal(in_one_call(native, X, kind.instructions, rooms, alone), expected)


def test_a_matrix_that_a_thread_has_to_itself_has_the_same_bits(native, kind, threads):
    """So many and so large that each of two threads takes some whole."""
    threads(2)
    X = normalized(kind, 5, 128, 256)
    expected = step_by_step(native, X, kind.instructions)
    assert torch.equal(in_one_call(native, X, kind.instructions, 2, True), expected)
    assert torch.equal(in_one_call(native, X[3:4], kind.instructions, 2, True), expected[3:4])


def test_rows_and_matrices_may_lie_apart(native, kind):
    wide = torch.cat([normalized(kind, 6, 40, 70)] * 2, 2)
    X, between = wide[::2, :, :70], wide[1::2].clone()
    expected = step_by_step(native, X, kind.instructions)
    A, B = torch.empty(2, 40, 40, dtype=kind.dtype), torch.empty(2, 40, 40, dtype=kind.dtype)
    native.newton_schulz_(X, A, B, COEFFICIENTS, True, kind.instructions)
    assert torch.equal(X, expected) and torch.equal(wide[1::2], between)
    assert torch.equal(wide[::2, :, 70:], normalized(kind, 6, 40, 70)[::2])


def test_a_nan_stays_in_its_matrix(native, kind):
    X = normalized(kind, 5, 64, 96)
    clean = in_one_call(native, X, kind.instructions, 5, True)
    X[1, 3, 5] = torch.nan
    spoiled = in_one_call(native, X, kind.instructions, 5, True)
    assert spoiled[1].isnan().all()
    assert torch.equal(spoiled[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


def test_without_steps_or_matrices_nothing_happens(native, kind):
    X = normalized(kind, 2, 8, 12)
    before, room = X.clone(), torch.empty(1, 8, 8, dtype=kind.dtype)
    native.newton_schulz_(X, room, room.clone(), [], True, kind.instructions)
    assert torch.equal(X, before)
    native.newton_schulz_(X[:0], room[:0], room[:0].clone(), COEFFICIENTS, True, kind.instructions)
    empty = torch.empty(3, 8, 0, dtype=kind.dtype)
    native.newton_schulz_(empty, room, room.clone(), COEFFICIENTS, True, kind.instructions)


def arguments(**changes) -> dict:
    given = {"X": torch.ones(2, 3, 4), "A": torch.ones(2, 3, 3), "B": torch.ones(2, 3, 3)}
    given = {name: x.bfloat16() for name, x in given.items()}
    return {**given, "coefficients": COEFFICIENTS, "alone": True, "instructions": "portable", **changes}


ONES = torch.ones(100).bfloat16()
BAD = {
    r"X and A must be \(batch, m, n\)": {"X": ONES[:12].view(3, 4)},
    r"X and A must be \(batch, m, n\) and .*, got \(2, 3, 4\) and \(3, 3\)": {"A": ONES[:9].view(3, 3)},
    "X must be float32 or bfloat16": {"X": torch.ones(2, 3, 4).half()},
    "A must be .* as X is": {"A": torch.ones(2, 3, 3)},
    "B must be .* as X is": {"B": torch.ones(2, 3, 3)},
    r"A must be \(2, 3, 3\)": {"A": ONES[:32].view(2, 4, 4)},
    r"B must be \(2, 3, 3\)": {"B": ONES[:9].view(1, 3, 3)},
    "A must have room for a matrix": {"A": ONES[:0].view(0, 3, 3), "B": ONES[:0].view(0, 3, 3)},
    "X must have a stride of 1": {"X": ONES[:24].view(2, 4, 3).mT},
    "A must be contiguous": {"A": ONES[:24].view(2, 3, 4)[:, :, :3]},
    "B must be contiguous": {"B": ONES[:18].view(2, 3, 3).mT},
    "coefficients must be three for each step, got 4": {"coefficients": [1.0] * 4},
    "X is written, so its elements": {"X": ONES[:12].view(1, 3, 4).expand(2, 3, 4)},
    "must not share memory": {"A": ONES[:18].view(2, 3, 3), "B": ONES[:18].view(2, 3, 3)},
    "got mmx": {"instructions": "mmx"},
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_raise_and_nothing_is_written(native, message):
    given = arguments(**BAD[message])
    before = [given[name].clone() for name in ("X", "A", "B")]
    with pytest.raises(RuntimeError, match=message):
        native.newton_schulz_(**given)
    assert all(map(torch.equal, (given[name] for name in ("X", "A", "B")), before))


def test_the_operation_keeps_torchs_rules_for_operators(native):
    utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(native.newton_schulz_.default, (), arguments(), test_utils=utilities)


def test_a_compiled_iteration_is_the_eager_one(kernel, native):
    """The iteration calls it where products are compiled, and only there."""
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    together, X = kernel.kernels.products.NATIVE, normalized(Kind(BFLOAT16, ""), 3, 40, 70)
    iterate = lambda X: kernel.iteration.newton_schulz(X.clone(), schedule, together)  # noqa: E731
    expected = kernel.iteration.newton_schulz(X.clone(), schedule, together._replace(newton_schulz=None))
    assert torch.equal(iterate(X), expected)
    assert torch.equal(torch.compile(iterate, fullgraph=True, backend="aot_eager")(X), expected)
    out = torch.empty_like(X)
    assert kernel.iteration.newton_schulz(X.clone(), schedule, together, out) is out and torch.equal(out, expected)
