"""What half precision needs: no Gram iteration in bfloat16, and a scale that float16 does not lose digits without."""

import pytest
import torch

from tests.support.iterations import Carried, gram, standard
from tests.support.spectra import SPECTRA, composed, singular_vectors, with_spectrum

pytestmark = pytest.mark.usefixtures("one_thread")

RESTARTS = {"standard": (), "gram": (2,)}
SCALES = [2.0**k for k in range(7)]


def at_scale(kernel, schedule, scale, method):
    """Return the float16 iteration of this method with this scale, whatever `folded_scale` says."""
    chosen = kernel.iteration.choose_iteration(torch.device("cpu"), torch.float16, (64, 64), schedule, method)
    folded = kernel.schedules.with_folded_scale(schedule, scale)
    return chosen._replace(scale=scale, windows=kernel.stability.split(folded, RESTARTS[method]))


def gram_error(kernel, schedule, restarts, dtype, spectrum):
    """Return the relative error of the Gram iteration, restarted at will, on a 64 x 160 matrix of this spectrum."""
    sigma = SPECTRA[spectrum](64)
    sigma = sigma / sigma.norm()
    left, right = singular_vectors(64, 160, seed=0)
    X = ((left * sigma) @ right.mT).to(dtype)
    windows = kernel.stability.split(schedule, restarts)
    factor = kernel.kernels.newton_schulz.gram_newton_schulz(X, windows, kernel.kernels.products.SINGLE, dtype).double()
    exact = composed(schedule, sigma)
    return ((factor - (left * exact) @ right.mT).norm() / exact.norm()).nan_to_num(torch.inf).item()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", ["polar_express", "polar_express_safer", "quintic", "original"])
def test_gram_in_bfloat16_is_refused_by_name(kernel, name):
    with pytest.raises(
        ValueError, match=r"method 'gram' is not safe .* in torch\.bfloat16 .* use gram_float32 or standard"
    ):
        kernel.orthogonalize(torch.ones(4, 9), name, dtype=torch.bfloat16, method="gram")


@pytest.mark.parametrize("name", ["polar_express", "polar_express_safer", "quintic", "original"])
def test_gram_in_bfloat16_diverges(kernel, name):
    """An error as large as half of the result, or all of it; float16 with its restart stays below a tenth."""
    schedule = kernel.schedules.resolve_schedule(name, 5)
    for spectrum in ("condition_1e6", "log_spaced", "rank_deficient", "one_huge"):
        assert gram_error(kernel, schedule, (), torch.bfloat16, spectrum) > 0.5, spectrum
        assert gram_error(kernel, schedule, (2,), torch.float16, spectrum) < 0.1, spectrum


@pytest.mark.parametrize("scale", SCALES)
def test_folded_scale_changes_no_bit_in_float64(kernel, scale):
    """Powers of two are exact, and float64 has no subnormal numbers here: what the scale does is only shift."""
    X = with_spectrum(SPECTRA["power_law"](24), 24, 40, seed=0) / 2
    products, split = kernel.kernels.products.SINGLE, kernel.stability.split
    for name in kernel.schedules.PRESETS:
        schedule = kernel.schedules.resolve_schedule(name, 5)
        folded = kernel.schedules.with_folded_scale(schedule, scale)
        plain, shifted = (
            kernel.kernels.newton_schulz.newton_schulz(factor * X, steps, products)
            for factor, steps in ((1, schedule), (scale, folded))
        )
        assert torch.equal(plain, shifted)
        plain, shifted = (
            kernel.kernels.newton_schulz.gram_newton_schulz(factor * X, split(steps, (2,)), products, torch.float64)
            for factor, steps in ((1, schedule), (scale, folded))
        )
        assert torch.equal(plain, shifted)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("m, scale", [(1, 1), (2, 2), (7, 2), (8, 4), (31, 4), (32, 8), (2048, 8), (10**6, 8)])
def test_scale_is_a_power_of_two_near_root_m_up_to_8(kernel, m, scale):
    """Other dtypes than float16 have a scale of 1."""
    for name in kernel.schedules.PRESETS:
        schedule = kernel.schedules.resolve_schedule(name, 5)
        assert kernel.stability.folded_scale(torch.float16, m, schedule) == scale, name
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            assert kernel.stability.folded_scale(dtype, m, schedule) == 1


@pytest.mark.kernels_ci
def test_schedule_with_larger_values_has_a_smaller_scale(kernel):
    """4 x takes a value of 1 to 4: with a scale of 4 the square of its Gram matrix would have an entry of 16⁴."""
    assert kernel.stability.largest_value(((4.0, 0.0, 0.0),)) == 4
    assert kernel.stability.folded_scale(torch.float16, 10**6, ((4.0, 0.0, 0.0),)) == 2


@pytest.mark.kernels_ci
def test_the_largest_value_of_a_cubic_step_may_be_in_its_interior(kernel):
    """x (3 - 2 x²) is 1 at 1, and largest at the root of a half, where it is that of 2."""
    assert kernel.stability.largest_value(((3.0, -2.0, 0.0),)) == pytest.approx(2**0.5)


def test_a_maximum_that_no_value_reaches_does_not_count(kernel):
    """x (3 - x² / 4) / 2 rises up to x = 2, where it is 2; values start below 1, where it is 11 / 8."""
    assert kernel.stability.largest_value(((1.5, -0.125, 0.0),)) == 1.375


def test_the_largest_value_may_be_negative_or_that_of_a_value_above_one(kernel):
    """x (3.6 - 62 x² + 60 x⁴) falls to -12 sqrt(0.6) at the root of 0.6; x (6 - x² / 2) has its maximum 8 at 2."""
    assert kernel.stability.largest_value(((3.6, -62.0, 60.0),)) == pytest.approx(12 * 0.6**0.5)
    assert kernel.stability.largest_value(((3.0, 0.0, 0.0), (6.0, -0.5, 0.0))) == 8


@pytest.mark.parametrize("name", ["polar_express", "polar_express_safer", "quintic", "original"])
@pytest.mark.parametrize("steps", [1, 5, 9])
def test_largest_value_is_that_of_a_fine_grid(kernel, name, steps):
    """Between two of 10^5 points a step, whose second derivative is below 200, rises by less than 200 (1e-5)² / 8."""
    schedule = kernel.schedules.resolve_schedule(name, steps)
    x, largest = torch.linspace(0, 1, 10**5 + 1, dtype=torch.float64), 1.0
    for a, b, c in schedule:
        peak = (x * (a + x * x * (b + x * x * c))).abs().max().item()
        largest = max(largest, peak)
        x = torch.linspace(0, peak, 10**5 + 1, dtype=torch.float64)
    assert 0 <= kernel.stability.largest_value(schedule) - largest <= 1e-7


def with_parts(products, largest):
    """Return products that note, in the list `largest`, the most that any part of one of their sums can be."""

    def noted(product, *factors):
        for A, B in zip(factors, factors[1:]):
            largest.append((A.abs() @ B.abs()).max().item())
        return product

    return products._replace(
        gram=lambda X, out=None: noted(products.gram(X, out), X, X.mT),
        gram_affine=lambda A, b, c, a, out=None: noted(products.gram_affine(A, b, c, a, out), A, A),
        commuting=lambda A, B, out=None: noted(products.commuting(A, B, out), A, B),
        conjugated=lambda A, B: noted(products.conjugated(A, B), B @ A, A, B),
        affine=lambda B, X, a, out=None: noted(products.affine(B, X, a, out), B, X),
    )


def few_rows(kernel, schedule):
    """Yield 64 x 160 matrices of norm 1 with one entry, of rank one, with one row, and with two: one is at its peak."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (64, 160))
    rows = torch.zeros(4, 64, 160, dtype=torch.float64)
    rows[0, 3, 5], rows[1], rows[2, 7] = 1, torch.outer(u, v), v
    sigma = torch.linspace(0, 1, 10**5, dtype=torch.float64)
    rows[3, 0, 0] = peak = sigma[composed(schedule[:1], sigma).abs().argmax()]
    rows[3, 1, 1] = (1 - peak**2).sqrt()
    return rows / torch.linalg.matrix_norm(rows)[:, None, None]


@pytest.mark.parametrize("name", ["polar_express", "polar_express_safer", "quintic", "original"])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_no_part_of_a_sum_leaves_float16s_range(kernel, name, method):
    """Whatever a library splits the sums into, and adds in float16. Two rows come within two percent of the limit."""
    schedule, limit = kernel.schedules.resolve_schedule(name, 5), torch.finfo(torch.float16).max
    for scale in (kernel.stability.folded_scale(torch.float16, 64, schedule), 16.0):
        iteration, largest = at_scale(kernel, schedule, scale, method), []
        iteration = iteration._replace(
            work_dtype=torch.float64,
            chain_dtype=torch.float64,
            products=with_parts(kernel.kernels.products.SINGLE, largest),
        )
        for G in few_rows(kernel, schedule):
            kernel.polar.factors.polar_factors(G[None], iteration, eps=0)
        assert (max(largest) <= limit) == (scale == 8), (scale, max(largest))
        if name == "polar_express" and scale == 8 and method == "standard":
            assert max(largest) > 0.98 * limit


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("scale", SCALES)
def test_rank_one_is_accurate_at_every_scale(kernel, scale, method):
    """The one singular value is 1, and is one entry or all of them: the largest Gram matrices there are."""
    one_entry, spread = torch.zeros(8, 24), torch.ones(8, 24)
    one_entry[2, 3] = 1
    for name in kernel.schedules.PRESETS:
        schedule = kernel.schedules.resolve_schedule(name, 5)
        iteration = at_scale(kernel, schedule, scale, method)
        for G in (one_entry, spread):
            factor = kernel.polar.factors.polar_factors(G[None], iteration, eps=0)[0].double()
            expected = composed(schedule, 1.0) * G.double() / G.norm()
            # One number stands for all: its roundings, about 16, may go one way, 4 times as far as chance would.
            X = Carried.exact(G.double() / G.norm(), seed=0).to(torch.float16)
            windows = kernel.stability.split(schedule, RESTARTS[method])
            carried = standard(X, schedule) if method == "standard" else gram(X, windows, torch.float16)
            assert (factor - expected).norm() <= 4 * carried.error(), name


def test_scale_keeps_digits_of_a_large_gram_matrix(kernel):
    """Entries of X Xᵀ are about 1 / (m sqrt(n)) = 1e-5 here, and float16's smallest normal number is 6e-5."""
    m = n = 2048
    G = torch.randn(m, n, generator=torch.Generator().manual_seed(0))
    errors = []
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    for scale in (1.0, kernel.stability.folded_scale(torch.float16, m, schedule)):
        rows = kernel.kernels.normalization.normalize(G, torch.float16, 0.0, scale)[:256]
        exact = rows.float() @ rows.float().mT
        errors.append((torch.mm(rows, rows.mT).float() - exact).norm() / exact.norm())
    # Entries there are spaced by 2^-24, which is 5 times the spacing that ten bits more give numbers of their size.
    assert errors[0] > 2.5 * errors[1]
