"""How far rounding takes an orthogonalization from the float64 polynomial, against bounds derived from the rounding."""

import functools

import pytest
import torch

from tests.support.iterations import Carried, gram, standard, unit_roundoff
from tests.support.spectra import SPECTRA, composed, singular_vectors

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = ("polar_express", "polar_express_safer", "quintic", "original")
# A work dtype, a method, the dtype of the Gram iteration's chain, and where that restarts in five steps.
CASES = {
    "float16-standard": (torch.float16, "standard", None, ()),
    "float16-gram": (torch.float16, "gram", torch.float16, (2,)),
    "float16-gram_float32": (torch.float16, "gram_float32", torch.float32, ()),
    "bfloat16-standard": (torch.bfloat16, "standard", None, ()),
    "bfloat16-gram_float32": (torch.bfloat16, "gram_float32", torch.float32, ()),
    "float32-standard": (torch.float32, "standard", None, ()),
    "float32-gram": (torch.float32, "gram", torch.float32, ()),
    "float64-standard": (torch.float64, "standard", None, ()),
    "float64-gram": (torch.float64, "gram", torch.float64, ()),
}
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
M, N = 64, 160
# `Carried` takes each rounding for as large as it can be, 2.4 times what is to be expected, and lets chance add them
# up. Where one number stands for many, as in a flat spectrum, they are one rounding, and chance evens nothing out.
LUCK = 1.5


def test_a_carried_change_is_the_derivative_of_what_carries_it():
    """Of a product and of a sum with one. In float64 the roundings are far below changes of the size of the values."""
    generator, (alpha, beta) = torch.Generator().manual_seed(0), (0.5, -3.0)
    values = torch.randn(3, 6, 6, generator=generator, dtype=torch.float64)
    changes = torch.randn(3, Carried.DRAWS, 6, 6, generator=generator, dtype=torch.float64)
    A, B, C = (Carried(*pair, torch.float64, generator) for pair in zip(values, changes))
    expected = A.change @ B.value + A.value @ B.change
    torch.testing.assert_close((A @ B).change, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        C.addmm(A, B, beta=beta, alpha=alpha).change, beta * C.change + alpha * expected, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(C.add(A.value, 2.0).change, C.change, rtol=0, atol=1e-12)


def test_each_operation_carries_a_rounding_of_its_result():
    """u |x| in a dtype that is narrower. Sums of products add those of their partial sums in float32, far less."""
    generator, k, u = torch.Generator().manual_seed(0), 6, 2.0**-11
    values, none = torch.randn(3, k, k, generator=generator, dtype=torch.float64), torch.zeros(Carried.DRAWS, k, k)
    A, B, C = (Carried(value, none.double(), torch.float16, generator) for value in values)
    sums = 2.0**-24 * k**0.5 * (values[0].square() @ values[1].square() + (values[0] @ values[1]).square()).sqrt()
    for result, alpha in ((A @ B, 1.0), (C.addmm(A, B, beta=-3.0, alpha=0.5), 0.5), (C.add(values[0], 2.0), 0.0)):
        added = result.change.abs() - u * result.value.abs()
        assert (added.abs() <= alpha * sums * (1 + 2**-22) + 1e-15).all()  # signs, and their factors, are float32
    wide = Carried(values[0], none.double(), torch.float32, generator)
    assert torch.equal(wide.to(torch.float16).change.abs(), (u * values[0].abs()).expand_as(none))
    assert torch.equal(A.to(torch.float32).change, none.double())


def test_the_carried_error_of_a_long_sum_is_a_few_times_the_real_one():
    """One after the other, k terms of the size 1 make partial sums of the sizes of roots, which round by 0.42 u of
    themselves in the mean square: 0.42 u k / sqrt(2) in all. Carried are u k sqrt(2): 4.8 times as much."""
    k, generator = 4096, torch.Generator().manual_seed(0)
    A, B = (torch.randn(shape, generator=generator) for shape in ((24, k), (k, 24)))
    sums = torch.zeros(24, 24)
    for a, b in zip(A.T, B):
        sums += a[:, None] * b
    real = torch.linalg.matrix_norm(sums.double() - A.double() @ B.double()).item()
    a, b = (
        Carried(x.double(), torch.zeros(Carried.DRAWS, *x.shape).double(), torch.float32, generator) for x in (A, B)
    )
    assert 2.4 * real <= (a @ b).error() <= 9.6 * real


def test_the_carried_error_of_a_sum_that_cancels_is_that_of_its_terms():
    """Of k terms of the size 1 the root of the sum of squares is that of k, and there are k roundings."""
    k = 64
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(k // 2)[:, None]
    a, b = (Carried.exact(x, seed=0) for x in (torch.ones(1, k, dtype=torch.float64), signs))
    a.dtype = b.dtype = torch.float32
    assert (a @ b).error() == pytest.approx(k * 2.0**-24)


@pytest.fixture(params=SCHEDULES)
def name(request):
    return request.param


@pytest.fixture
def schedule(kernel, name):
    return kernel.schedules.resolve_schedule(name, 5)


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def normalized(spectrum):
    sigma = SPECTRA[spectrum](M)
    return sigma / sigma.norm()


def between_vectors(sigma, seed=0):
    """Return U diag(sigma) Vᵀ (M, N), float64."""
    left, right = vectors(seed)
    return (left * sigma) @ right.mT


vectors = functools.cache(functools.partial(singular_vectors, M, N))


def split(schedule, restarts):
    bounds = [0, *restarts, len(schedule)]
    return [schedule[start:stop] for start, stop in zip(bounds, bounds[1:])]


def plainly(X, schedule, case):
    """Return p(X) by the oracle of this case."""
    _, method, chain_dtype, restarts = CASES[case]
    return standard(X, schedule) if method == "standard" else gram(X, split(schedule, restarts), chain_dtype)


def input_dtype(case):
    return torch.promote_types(CASES[case][0], torch.float32)


@functools.cache
def bound(schedule, spectrum, case, order="fro"):
    """Return how far rounding may take p(G) of a normalised G, in this norm: all roundings, each carried to the end.

    Each adds to X by the unit roundoff of its dtype times what is rounded, and from there on grows by the derivative
    of the steps that follow: in the standard iteration by at most the product of their first coefficients, in the Gram
    iteration, where it falls on R, by at most `stability.amplification`. What a spectrum sees of these is less by
    orders of magnitude, hence the calculation. G itself is exact up to the product that makes it of U, sigma and V.
    """
    left, right = vectors(0)
    G = Carried.exact(left * normalized(spectrum), seed=1) @ Carried.exact(right.mT, seed=2)
    change = plainly(G.to(CASES[case][0]), schedule, case).change
    return LUCK * torch.linalg.matrix_norm(change, order).square().mean().sqrt().item()


def error(kernel, name, case, spectrum, scale=1.0, device="cpu"):
    """Return factor - p(G), where G has this spectrum and is `scale` times as large, float64."""
    dtype, method, *_ = CASES[case]
    G = (scale * between_vectors(normalized(spectrum))).to(device, input_dtype(case))
    factor = kernel.orthogonalize(G, name, dtype=dtype, method=method, eps=0).cpu()
    schedule = kernel.schedules.resolve_schedule(name, 5)
    return factor.double() - between_vectors(composed(schedule, normalized(spectrum)))


@on_every_device
def test_error_is_within_the_bound_of_its_roundings(kernel, name, schedule, case, device):
    for spectrum in SPECTRA:
        assert error(kernel, name, case, spectrum, device=device).norm() <= bound(schedule, spectrum, case), spectrum


def test_dominant_row_errs_no_more_than_its_roundings(kernel, name, schedule, case):
    """The left vector of the one huge singular value is not spread over rows: one entry of X Xᵀ is nearly all of it."""
    dtype, method, *_ = CASES[case]
    sigma, row = normalized("one_huge"), M // 2
    left, right = torch.zeros(M, M, dtype=torch.float64), vectors(0)[1]
    left[row, 0], others = 1, torch.arange(M) != row
    left[others, 1:] = singular_vectors(M - 1, M - 1, seed=0)[0]
    factor = kernel.orthogonalize((left * sigma @ right.mT).to(input_dtype(case)), name, dtype=dtype, method=method)
    G = Carried.exact(left * sigma, seed=1) @ Carried.exact(right.mT, seed=2)
    allowed = LUCK * plainly(G.to(dtype), schedule, case).error()
    assert (factor.double() - (left * composed(schedule, sigma)) @ right.mT).norm() <= allowed


@on_every_device
def test_error_is_at_most_twice_that_of_torchs_products(kernel, name, schedule, case, device):
    dtype, method, *_ = CASES[case]
    # A flat spectrum is one number on the diagonal, rounded alike everywhere: its few roundings are a matter of luck in
    # every draw, and the bound of its roundings judges them.
    for spectrum in SPECTRA.keys() - {"flat"}:
        sigma, ours, plain = normalized(spectrum), 0.0, 0.0
        # A Gram iteration amplifies a few directions, in which roundings are a matter of luck: three draws.
        for seed in range(3):
            G = between_vectors(sigma, seed).to(device)
            exact = between_vectors(composed(schedule, sigma), seed).to(device)
            factor = kernel.orthogonalize(G.to(input_dtype(case)), name, dtype=dtype, method=method)
            ours += (factor.double() - exact).norm().item() ** 2
            plain += (plainly(G.to(dtype), schedule, case).double() - exact).norm().item() ** 2
        # Where there is next to no error, a few roundoffs more or less, in each draw.
        few = 3**0.5 * 4 * unit_roundoff(dtype) * exact.norm().item()
        assert ours**0.5 <= 2 * plain**0.5 + few, spectrum


@pytest.mark.parametrize(
    "case, share", [("float32-standard", 3e-4), ("float64-standard", 1e-11), ("float64-gram", 1e-10)]
)
def test_bound_detects_a_wrong_fourth_digit(schedule, case, share):
    """What the bounds are worth: the polynomial of the wrong schedule is further away than an error and a bound."""
    for step in range(5):
        for place in range(3):
            triple = list(schedule[step])
            triple[place] *= 1 + share
            wrong = (*schedule[:step], tuple(triple), *schedule[step + 1 :])
            moved = {s: (composed(wrong, normalized(s)) - composed(schedule, normalized(s))).norm() for s in SPECTRA}
            assert any(moved[s] > 2 * bound(schedule, s, case) for s in SPECTRA), (step, place)


def test_bound_detects_a_dropped_restart(kernel, name, schedule):
    errors = {}
    for spectrum in SPECTRA:
        X = between_vectors(normalized(spectrum)).half()
        iterate, single = kernel.kernels.newton_schulz.gram_newton_schulz, kernel.kernels.products.SINGLE
        without = iterate(X, [schedule], single, torch.float16)
        exact = between_vectors(composed(schedule, normalized(spectrum)))
        errors[spectrum] = (without.double() - exact).norm().nan_to_num(torch.inf)
    assert any(errors[spectrum] > bound(schedule, spectrum, "float16-gram") for spectrum in SPECTRA)


def test_singular_values_end_in_the_schedules_band(kernel, name, schedule, case):
    """The defect of orthogonality. Singular values move by at most the spectral norm of the error (Weyl)."""
    low, high = kernel.schedules.PRESETS[name].band
    inside = [spectrum for spectrum in SPECTRA if normalized(spectrum).min() >= 1e-3]
    assert len(inside) >= 3
    for spectrum in inside:
        moved = bound(schedule, spectrum, case, order=2)
        exact = between_vectors(composed(schedule, normalized(spectrum)))
        values = torch.linalg.svdvals(error(kernel, name, case, spectrum) + exact)
        # The band is printed with six digits.
        assert low - moved - 1e-6 <= values.min() and values.max() <= high + moved + 1e-6, spectrum


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_error_is_independent_of_the_gradients_size(kernel, case, scale):
    """Squares of 1e30 and 1e-30 overflow and underflow in float32."""
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    for spectrum in ("power_law", "gaussian"):
        assert error(kernel, "polar_express", case, spectrum, scale).norm() <= bound(schedule, spectrum, case)


def test_tall_result_is_the_transpose_of_the_wide_one(kernel, case):
    dtype, method, *_ = CASES[case]
    G = between_vectors(normalized("gaussian")).to(dtype)
    wide, tall = (kernel.orthogonalize(X, dtype=dtype, method=method) for X in (G, G.mT.contiguous()))
    assert torch.equal(tall, wide.mT)
