"""What `Carried` carries is what roundings do: each operation adds its rounding, and passes earlier ones on."""

from __future__ import annotations

import math

import pytest
import torch

HALVES = (torch.bfloat16, torch.float16)
SIDE = 48
# Each operation in float64, of matrices or of what stands for them.
OPERATIONS = {
    "transpose": lambda A, B, D: A.mT,
    "product": lambda A, B, D: A @ B,
    "product of a matrix and its transpose": lambda A, B, D: A @ A.mT,
    "product and addend": lambda A, B, D: D.addmm(A, B, beta=0.5, alpha=2.0),
    "square and addend": lambda A, B, D: A.addmm(A, A, beta=-1.5),
    "exact addend": lambda A, B, D: A.add(normal(9, SIDE, SIDE), alpha=0.3),
}
ROUNDED = {name: operation for name, operation in OPERATIONS.items() if name != "transpose"}


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def carried(kernel):
    """Make a value in a dtype, which no rounding has changed, or which `change` has."""

    def made(value, dtype, change=None):
        exact = kernel.tuning.error_propagation.Carried.exact(value, 0)
        change = exact.change if change is None else change
        return type(exact)(value, change, dtype, exact.generator)

    return made


def to_nearest(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype).double()


def in_turn(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Return A B, each partial sum rounded to float32."""
    total = torch.zeros(A.size(0), B.size(1), dtype=torch.float64)
    for column, row in zip(A.mT, B):
        total = to_nearest(total + column[:, None] * row, torch.float32)
    return total


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("operation", ROUNDED.values(), ids=list(ROUNDED))
def test_an_operation_adds_the_rounding_of_its_result(carried, operation, dtype):
    """As large as it can be: between 2 and √7 times what it is.

    A rounding is uniform up to u times the binade's start s. Values x in [s, 2s) have a mean square of 7/3 s² if they
    are uniform too, and not much less than 4/3 s² where small ones are more frequent.
    """
    A, B, D = (to_nearest(normal(seed, SIDE, SIDE), dtype) for seed in range(3))
    exact = operation(A, B, D)
    result = operation(*(carried(value, dtype) for value in (A, B, D)))
    assert torch.allclose(result.value, exact, rtol=1e-12, atol=1e-12) and result.dtype == dtype
    rounding = torch.linalg.matrix_norm(to_nearest(exact, dtype) - exact).item()
    assert 2 * rounding < result.error() < math.sqrt(7) * rounding


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_conversion_rounds_where_the_dtype_is_narrower(carried, dtype):
    """By u |x| for each entry, in whatever direction."""
    value = normal(0, SIDE, SIDE)
    narrow = carried(value, torch.float32).to(dtype)
    u = torch.finfo(dtype).eps / 2
    assert torch.equal(narrow.change.abs(), (u * value.abs()).expand(4, -1, -1))
    assert narrow.dtype == narrow.mT.dtype == dtype
    assert math.isclose(narrow.error(), u * value.norm().item())
    for other in (dtype, torch.float32):
        same = narrow.to(other)
        assert torch.equal(same.change, narrow.change) and same.dtype == other


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_earlier_roundings_pass_through_an_operation_by_its_derivative(carried, operation):
    """No operation is more than quadratic, so central differences are exact, up to float64's rounding."""
    values = [normal(seed, SIDE, SIDE) for seed in range(3)]
    changes = [normal(10 + seed, 4, SIDE, SIDE) for seed in range(3)]
    result = operation(*(carried(value, torch.float64, change) for value, change in zip(values, changes)))
    for draw, change in enumerate(result.change):
        above, below = (
            operation(*(value + sign * draws[draw] for value, draws in zip(values, changes))) for sign in (1, -1)
        )
        assert torch.allclose(change, (above - below) / 2, rtol=1e-11, atol=1e-11)


def test_an_error_is_the_root_of_the_mean_square_of_the_draws(carried):
    change = torch.zeros(4, 2, 2, dtype=torch.float64)
    change[1, 0], change[3, 1] = 3.0, 4.0
    assert math.isclose(carried(torch.ones(2, 2), torch.float32, change).error(), math.sqrt((2 * 9 + 2 * 16) / 4))


# Operands (A, B) whose partial sums grow as a random walk does, in one direction, and until they cancel.
SUMS = {
    "random": lambda k: (normal(0, SIDE, k), normal(1, k, SIDE)),
    "of one sign": lambda k: (normal(0, SIDE, k).abs(), normal(1, k, SIDE).abs()),
    "cancelling": lambda k: (normal(0, SIDE, k // 2).repeat(1, 2), normal(1, k // 2, SIDE).repeat(2, 1)),
}


@pytest.mark.parametrize("k", [32, 256])
@pytest.mark.parametrize("kind", SUMS)
def test_a_product_adds_the_roundings_of_its_sums_in_float32(carried, kind, k):
    """At least twice what they are, as those of results, and no more than 6 times.

    In one direction the squares of k partial sums, of which the last is c, add up to k c² / 3, as a random walk's to
    k c² / 2; each rounding is 0.42 u of its sum. √k u c is 4.1 and 3.4 times that; of a random walk it counts c twice.
    """
    A, B = (to_nearest(operand, torch.float32) for operand in SUMS[kind](k))
    if kind == "cancelling":
        B[k // 2 :].neg_()
    roundings = torch.linalg.matrix_norm(in_turn(A, B) - A @ B).item()
    for product in (
        carried(A, torch.float32) @ carried(B, torch.float32),
        carried(torch.zeros(SIDE, SIDE, dtype=torch.float64), torch.float32).addmm(
            carried(A, torch.float32), carried(B, torch.float32), beta=1.0
        ),
    ):
        assert 2 * roundings < product.error() < 6 * roundings


def test_draws_are_independent_and_the_same_every_time(carried):
    """Signs are even, and those of two draws, or of two operations, agree in about half of the places.

    The sum of n signs is within 5 √n, but for one seed in a million.
    """
    value = torch.ones(SIDE, SIDE, dtype=torch.float64)
    first, second = (carried(value, torch.float32).to(torch.float16).change.sign() for _ in range(2))
    assert torch.equal(first, second)
    again = carried(value, torch.float32)
    signs = torch.stack([again.add(value, 1.0).change.sign(), again.add(value, 1.0).change.sign()])
    assert signs.unique().tolist() == [-1.0, 1.0]
    for each in (signs, signs[0] * signs[1], signs[:, 0] * signs[:, 1]):
        assert each.sum().abs() < 5 * math.sqrt(each.numel())


def test_a_polynomial_of_the_proof_rounds_each_product_as_the_kernel_does(kernel):
    """The error of five steps is 2 to 4 times that of the same steps with results rounded to nearest.

    2.4 for each rounding, times what four draws and one matrix may be off.
    """
    small, schedule = kernel.tuning.small_proof, kernel.schedules.resolve_schedule("polar_express", 5)
    windows, dtype = small.in_windows(schedule, (1,) * 5, small.SCALE), torch.bfloat16
    G = small.adversarial(SIDE, 2 * SIDE)[0]
    X = to_nearest(small.SCALE * G.double() / torch.linalg.matrix_norm(G.double()), dtype)
    for ((a, b, c),) in windows:
        A = to_nearest(X @ X.mT, dtype)
        B = to_nearest(b * A + c * A @ A, dtype)
        X = to_nearest(a * X + B @ X, dtype)
    error = torch.linalg.matrix_norm(X - small.exact(G, schedule)).item()
    assert 2 * error < small.largest_error(G, windows, small.SCALE, dtype) < 4 * error
