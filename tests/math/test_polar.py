"""Orthogonalization against the golden results and against the scalar polynomial that specifies it."""

import functools
import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tests.support.spectra import SPECTRA, composed, with_spectrum

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
METHODS = [
    (torch.float64, "standard"),
    (torch.float64, "gram"),
    (torch.float32, "standard"),
    (torch.float32, "gram"),
    (torch.bfloat16, "standard"),
    (torch.bfloat16, "gram_float32"),
    (torch.float16, "standard"),
    (torch.float16, "gram"),
    (torch.float16, "gram_float32"),
]
FLOORS = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


@pytest.fixture(scope="module")
def cases(repository):
    """The cases; the ones of the Motif iteration with the coefficients that it ran with, whose last are rounded."""
    golden = repository / "tests/golden"
    schedules = json.loads((golden / "coefficients.json").read_text())["schedules"]
    (motif,) = (s["coefficients"] for s in schedules if s["id"] == "schedule_l0.001_n10_s0.01_c0.02")
    cases = json.loads((golden / "newton_schulz.json").read_text())["cases"]
    return [{**case, "motif_schedule": motif} for case in cases]


@pytest.fixture(scope="module")
def arrays(repository):
    return np.load(repository / "tests/golden/newton_schulz.npz", allow_pickle=False)


def relative_error(x, reference):
    scale = reference.abs().max().clamp_min(1e-300)
    return ((x.double() - reference) / scale).norm() / (reference / scale).norm().clamp_min(1e-300)


def golden_options(kernel, case, G):
    """Return our arguments for a case: the references add eps to the norm, or scale the norm, where we clamp it."""
    options, algorithm = case["options"], case["algorithm"]
    steps = options.get("steps", 5)
    norm = kernel.kernels.normalization.frobenius_norm(G.double()).item()
    if algorithm == "timm":
        s = options["safety_factor"]
        (a, b, c), *rest = kernel.schedules.resolve_schedule(options["coefficients"], steps)
        return dict(ns_coefficients=[(a / s, b / s**3, c / s**5), *rest], ns_steps=steps, eps=options["eps"] / s)
    if algorithm == "motif":
        schedule = case["motif_schedule"]
    else:
        schedule = [[k / options.get("safety", 1.0) for k in (3.4445, -4.7750, 2.0315)]]
    return dict(ns_coefficients=schedule, ns_steps=steps, eps=norm + 1e-7)


def run_case(kernel, case, G, dtype):
    """Orthogonalize each matrix with its own eps."""
    matrices = G.reshape(-1, *G.shape[-2:])
    wide = matrices.to(torch.promote_types(G.dtype, dtype))
    options = [golden_options(kernel, case, X) for X in matrices]
    results = [kernel.orthogonalize(X, dtype=dtype, **arguments) for X, arguments in zip(wide, options)]
    return torch.stack(results).reshape(G.shape)


def test_float64_follows_the_golden_results(kernel, cases, arrays):
    for case in cases:
        G = torch.from_numpy(arrays[f"in/{case['input']}"]).double()
        expected = torch.from_numpy(arrays[f"out/{case['id']}"]).double()
        # Exact for timm; the eps that stands in for an added one is rounded once, which is one ulp of the input.
        assert relative_error(run_case(kernel, case, G, torch.float64), expected) <= case["tol_rel_float64"], case


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_other_dtypes_err_no_more_than_the_references(kernel, cases, arrays, dtype):
    name = str(dtype).replace("torch.", "")
    compared = 0
    for case in cases:
        reference_error = case["ref_rel_error_pooled"].get(name, case["ref_rel_error"].get(name))
        G = torch.from_numpy(arrays[f"in/{case['input']}"])
        actual = run_case(kernel, case, G, dtype)
        assert actual.isfinite().all(), case
        if reference_error is None or reference_error >= 0.5:
            continue  # the reference overflows or underflows there
        expected = torch.from_numpy(arrays[f"out/{case['id']}"]).double()
        assert relative_error(actual, expected) <= max(FLOORS[dtype], 4 * reference_error), case
        compared += 1
    assert compared >= 15


@pytest.mark.parametrize("m, n", [(48, 48), (48, 160), (160, 48)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_singular_values_follow_the_scalar_polynomial(kernel, spectrum, m, n):
    """The iteration acts on each singular value alone, so p(sigma) specifies it fully."""
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    sigma = SPECTRA[spectrum](min(m, n))
    G = with_spectrum(sigma, m, n, seed=0)
    expected = composed(schedule, sigma / sigma.norm()).sort(descending=True).values
    gain = math.prod(a for a, _, _ in schedule)
    for dtype in (torch.float64, torch.float32):
        factor = kernel.orthogonalize(G.to(dtype), dtype=dtype)
        # A perturbation is amplified by at most the product of the first coefficients, the slope of p at 0; the input
        # is rounded once and each of 15 products adds its own rounding, of values of about 1.
        bound = 16 * gain * torch.finfo(dtype).eps
        torch.testing.assert_close(torch.linalg.svdvals(factor.double()), expected, atol=bound, rtol=0)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("spectrum", ["flat", "clustered"])
def test_result_is_close_to_the_polar_factor(kernel, spectrum):
    """U Vᵀ of G = U S Vᵀ, within the band that the schedule promises for sigma in [1e-3, 1]."""
    G = with_spectrum(SPECTRA[spectrum](40), 40, 96, seed=1)
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    low, high = kernel.schedules.PRESETS["polar_express"].band
    difference = torch.linalg.matrix_norm(kernel.orthogonalize(G) - U @ Vh, ord=2)
    assert difference <= max(1 - low, high - 1) + 1e-9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [100, -100])
def test_scaling_by_a_power_of_two_changes_no_bit(kernel, dtype, exponent):
    """1e30 and 1e-30 overflow and underflow squares in float32; the norm must not notice."""
    G = with_spectrum(SPECTRA["power_law"](24), 24, 40, seed=2).float()
    plain = kernel.orthogonalize(G, dtype=dtype, eps=0)
    scaled = kernel.orthogonalize(G * 2.0**exponent, dtype=dtype, eps=0)
    assert plain.norm() > 1
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_float64_norms_neither_overflow_nor_vanish_beside_others(kernel, dtype):
    G = with_spectrum(SPECTRA["flat"](8), 8, 12, seed=3)
    scaled = kernel.orthogonalize(torch.stack([G * 2.0**900, G * 2.0**-900, G]), dtype=dtype, eps=0)
    torch.testing.assert_close(scaled[:2], scaled[2:].expand(2, -1, -1), atol=1e-10, rtol=0)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-7])
def test_zero_gives_zero(kernel, dtype, eps):
    assert torch.equal(kernel.orthogonalize(torch.zeros(2, 6, 9), dtype=dtype, eps=eps), torch.zeros(2, 6, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_eps_may_be_any_real_number(kernel, dtype):
    G = with_spectrum(SPECTRA["flat"](8), 8, 12, seed=5).to(dtype)
    assert torch.equal(kernel.orthogonalize(G, eps=Fraction(7, 2)), kernel.orthogonalize(G, eps=3.5))


def test_gradients_below_eps_stay_small(kernel):
    G = with_spectrum(SPECTRA["flat"](8), 8, 8, seed=4)
    gain = math.prod(a for a, _, _ in kernel.schedules.resolve_schedule("polar_express", 5))
    x = 1e-14 / 1e-7
    small = kernel.orthogonalize(G * 1e-14, eps=1e-7)
    # Far below eps p is linear: its slope at 0 times G / eps. The next term is (gain x)², in one or more of five steps.
    torch.testing.assert_close(small, gain * x * G, rtol=5 * (gain * x) ** 2, atol=0)


@functools.cache
def of_many_spectra(batch, m, n):
    """Return float64 matrices (batch, m, n) with one spectrum after the other."""
    spectra = itertools.islice(itertools.cycle(SPECTRA.values()), batch)
    return torch.stack([with_spectrum(spectrum(min(m, n)), m, n, seed=i) for i, spectrum in enumerate(spectra)])


@pytest.mark.parametrize(
    "shape, steps, dtype, method",
    # The long shapes are where libraries split the sum over k by the batch; emulated float16 takes its time there.
    [(shape, 2, *of) for shape in ((8, 200, 4096), (16, 128, 512)) for of in METHODS if of[0] != torch.float16]
    + [(shape, 5, *of) for shape in ((8, 64, 160), (1, 8, 300), (5, 31, 63), (5, 300, 7)) for of in METHODS],
    ids=str,
)
def test_matrix_gets_the_same_bits_alone_and_in_a_batch(kernel, shape, steps, dtype, method):
    G = of_many_spectra(*shape).to(torch.promote_types(dtype, torch.float32))
    together = kernel.orthogonalize(G, ns_steps=steps, dtype=dtype, method=method)
    for i in {0, 1 % len(G), len(G) // 2, len(G) - 1}:  # of 31 x 63, an odd number, some begin inside of a cache line
        alone = kernel.orthogonalize(G[i], ns_steps=steps, dtype=dtype, method=method)
        assert torch.equal(together[i], alone)


@pytest.mark.parametrize("dtype, method", METHODS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_value_stays_in_its_matrix(kernel, dtype, method, value):
    G = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(6)).to(dtype)
    clean = kernel.orthogonalize(G, dtype=dtype, method=method)
    G[1, 2, 3] = value
    result = kernel.orthogonalize(G, dtype=dtype, method=method)
    assert torch.equal(result[[0, 2]], clean[[0, 2]])
    assert result[1].isnan().any()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (2, 3, 6, 9), (0, 4, 5), (3, 0, 5), (4, 1, 1)], ids=str)
def test_shape_and_dtype_are_kept_and_input_is_untouched(kernel, shape, dtype):
    G = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    before = G.clone()
    for work_dtype in DTYPES:
        result = kernel.orthogonalize(G, dtype=work_dtype)
        assert (result.shape, result.dtype) == (G.shape, dtype)
        assert torch.equal(G, before)
        assert result is not G and (result.data_ptr() != G.data_ptr() or G.numel() == 0)


@pytest.mark.kernels_ci
def test_strides_of_the_input_do_not_matter(kernel):
    G = torch.randn(4, 20, 30, generator=torch.Generator().manual_seed(8))
    expected = kernel.orthogonalize(G)
    assert torch.equal(kernel.orthogonalize(G.mT.contiguous().mT), expected)
    assert torch.equal(kernel.orthogonalize(torch.stack([G, G], dim=-1)[..., 0]), expected)
    assert torch.equal(kernel.orthogonalize(G.mT), expected.mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matrices_of_half_precision_are_divided_in_float32_where_a_gradient_is_needed(kernel, dtype):
    """By a norm above float16's range, whose inverse is subnormal there. Quotient and multiplier round to float32."""
    G = (8192 * (1 + torch.rand(2, 20, 30, generator=torch.Generator().manual_seed(0)))).to(dtype)
    exact = G.double() / torch.linalg.matrix_norm(G.double(), keepdim=True)
    quotient = kernel.kernels.normalization.normalize(G.requires_grad_(), dtype, 1e-7).detach().double()
    roundoff = kernel.kernels.formats.unit_roundoff
    assert ((quotient - exact).abs() <= (roundoff(dtype) + 3 * roundoff(torch.float32)) * exact).all()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_narrower_matrices_are_divided_in_float64_if_that_is_the_work_dtype(kernel, dtype):
    """Two norms of 960 squares differ by at most 960 roundings of float64. One of float32 is 2^29 of these."""
    G = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = G.double() / torch.linalg.matrix_norm(G.double())
    normalized = kernel.kernels.normalization.normalize(G, torch.float64, 1e-7)
    torch.testing.assert_close(normalized, exact, rtol=962 * 2**-53, atol=0)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_parts_without_elements_have_the_norm_zero(kernel, shape):
    """Of a matrix that ranks share, one may have none."""
    for dtype in DTYPES:
        norms = kernel.kernels.normalization.frobenius_norm(torch.ones(shape, dtype=dtype))
        assert norms.shape == (shape[0], 1, 1) and (norms == 0).all()


@pytest.mark.kernels_ci
def test_orthogonalize_supports_autograd_and_vmap(kernel):
    G = Parameter(torch.randn(3, 6, 9, generator=torch.Generator().manual_seed(0)))
    assert kernel.orthogonalize(G, dtype=torch.float32).requires_grad
    one_by_one = torch.vmap(lambda X: kernel.orthogonalize(X, dtype=torch.float32))(G.detach())
    gain = torch.tensor([a for a, _, _ in kernel.polar_express()]).prod().item()
    torch.testing.assert_close(
        one_by_one, kernel.orthogonalize(G.detach(), dtype=torch.float32), rtol=0, atol=16 * gain * 2**-23
    )
