"""The presets, the solver behind them, and what users may pass instead."""

import json
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from tests.support.spectra import composed


@pytest.fixture(scope="module")
def schedules(kernel):
    return kernel.schedules


@pytest.fixture(scope="module")
def golden(repository):
    return json.loads((repository / "tests/golden/coefficients.json").read_text())


def largest_relative_difference(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    return np.max(np.abs(actual - expected) / np.abs(expected))


def remez_on_a_grid(low, high, points=20001):
    """The minimax odd quintic by exchange over a fixed grid in float64: nothing shared with the package's solver."""
    grid = np.linspace(low, high, points)
    basis = np.stack([grid, grid**3, grid**5], axis=1)
    chosen = np.linspace(0, points - 1, 4).astype(int)
    for _ in range(30):
        system = np.column_stack([basis[chosen], [1, -1, 1, -1]])
        coefficients = np.linalg.solve(system, np.ones(4))[:3]
        error = basis @ coefficients - 1
        turns = np.flatnonzero(np.diff(np.sign(np.diff(error)))) + 1
        extrema = np.concatenate([[0], turns, [points - 1]])
        assert len(extrema) == 4
        if np.array_equal(extrema, chosen):
            return coefficients, np.max(np.abs(error))
        chosen = extrema
    raise AssertionError("the exchange did not settle")


def test_presets_are_the_published_tables(schedules, golden):
    assert {preset["name"] for preset in golden["presets"]} == set(schedules.PRESETS)
    for preset in golden["presets"]:
        published = tuple(tuple(triple) for triple in preset["coefficients"])
        assert schedules.PRESETS[preset["name"]].coefficients == published


def test_presets_name_the_band_that_five_steps_reach(schedules):
    x = np.geomspace(1e-3, 1, 200_001)
    for name, preset in schedules.PRESETS.items():
        y = composed(schedules.resolve_schedule(name, 5), x)
        # The band is rounded to six digits, outwards. Beside an extremum the grid is off by half its spacing in log x;
        # there the composed polynomial bends by at most the product of what each step does, under 1e3.
        h = np.log(1e3) / 200_000
        np.testing.assert_allclose((y.min(), y.max()), preset.band, atol=1e-6 + 1e3 * h**2 / 8, err_msg=name)
        assert preset.source


def test_deepseeks_schedule_is_eight_steps_and_two(schedules):
    """All of them, which settle; its first steps alone are another schedule, and refused."""
    preset = schedules.WHOLE["deepseek_v4"]
    assert preset.coefficients == ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
    y = composed(schedules.resolve_schedule("deepseek_v4", 10), np.geomspace(1e-3, 1, 200_001))
    np.testing.assert_allclose((y.min(), y.max()), preset.band, atol=2e-6)
    with pytest.raises(ValueError, match="deepseekv4 has 10 steps: write ns_steps=10, got 9"):
        schedules.resolve_schedule("deepseekv4", 9)
    assert schedules.resolve_schedule("deepseekv4", 11) == preset.coefficients + preset.coefficients[-1:]


@pytest.mark.parametrize("alias, name, steps", [("jordan", "original", 5), ("deepseekv4", "deepseek_v4", 10)])
def test_names_that_others_use_are_the_same_schedules(schedules, alias, name, steps):
    assert schedules.resolve_schedule(alias, steps) == schedules.resolve_schedule(name, steps)


def test_presets_reach_the_golden_bands(schedules, golden):
    for preset in golden["presets"]:
        for band in preset["bands"]:
            x = np.union1d(np.geomspace(band["lo"], 1, 20001), np.linspace(band["lo"], 1, 20001))
            y = composed(schedules.resolve_schedule(preset["name"], band["steps"]), x)
            np.testing.assert_allclose((y.min(), y.max()), band["band"], atol=1e-9)


def test_solver_gives_the_golden_schedules(schedules, golden):
    for case in golden["schedules"]:
        options = case["l"], case["num_iters"], case["safety_factor_eps"], case["cushion"]
        schedule = schedules.polar_express(*options)
        assert largest_relative_difference(schedule, case["coefficients_exact"]) <= case["tol_rel"], case["id"]


def test_solver_gives_the_golden_quintics(schedules, golden):
    with localcontext() as context:
        context.prec = 60
        for case in golden["quintic"]:
            coefficients = schedules.minimax_quintic(Decimal(case["l"]), Decimal(case["u"]))
            coefficients = [float(k) for k in coefficients]
            assert largest_relative_difference(coefficients, case["coefficients_exact"]) <= case["tol_rel"], case["id"]


def test_a_quintic_does_not_depend_on_the_callers_precision(schedules):
    low, high = Decimal("0.3"), Decimal("1.7")
    expected = schedules.minimax_quintic(low, high)
    with localcontext() as context:
        context.prec = 6
        assert schedules.minimax_quintic(low, high) == expected


@pytest.mark.parametrize("low, high", [(1e-3, 1.0), (0.02, 1.0), (0.1, 1.9), (0.4, 1.6)])
def test_solver_agrees_with_remez_on_a_grid(schedules, low, high):
    a, b, c = (float(k) for k in schedules.minimax_quintic(Decimal(low), Decimal(high)))
    coefficients, error = remez_on_a_grid(low, high)
    x = np.linspace(low, high, 20001)
    ours = composed([(a, b, c)], x)
    # Beside an extremum the grid is off by at most half its spacing: curvature times the spacing squared, over 8.
    spacing = (high - low) / 20000
    slack = spacing**2 * np.max(np.abs(6 * b * x + 20 * c * x**3)) / 8
    assert abs(np.max(np.abs(ours - 1)) - error) <= slack + 1e-12
    # Two quintics whose errors alternate at nearly the same four points with nearly the same height: their difference
    # is at most twice the slack there, and interpolating an odd quintic from three of the points at most triples it.
    assert np.max(np.abs(ours - composed([tuple(coefficients)], x))) <= 6 * slack + 1e-9


def test_solver_reproduces_the_polar_express_presets(schedules):
    for name, safety in (("polar_express", 1e-2), ("polar_express_safer", 2e-2)):
        schedule = schedules.polar_express(lower=1e-3, steps=8, safety=safety, cushion=0.02)
        published = schedules.PRESETS[name].coefficients
        # The published tables were solved in float64, which leaves the last, narrowest step five digits.
        assert largest_relative_difference(schedule[:6], published[:6]) <= 1e-12
        assert largest_relative_difference(schedule, published) <= 1e-5


def test_safety_divides_the_argument(schedules):
    """Dividing a, b and c by one number would scale the result instead."""
    plain = schedules.polar_express(lower=1e-2, steps=2, safety=0.0, cushion=0.0)[0]
    slowed = schedules.polar_express(lower=1e-2, steps=2, safety=0.25, cushion=0.0)[0]
    x = np.linspace(0, 1, 101)
    np.testing.assert_allclose(composed([slowed], x), composed([plain], x / 1.25), atol=1e-14)


def test_steps_cut_a_schedule_or_repeat_its_last_triple(schedules):
    triples = ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5))
    assert schedules.resolve_schedule(triples, 1) == triples[:1]
    assert schedules.resolve_schedule(triples, 4) == (triples[0], triples[1], triples[1], triples[1])
    assert schedules.resolve_schedule([2, -1.5, 0.5], 2) == (triples[1], triples[1])
    assert schedules.resolve_schedule(iter(triples), 2) == triples


@pytest.mark.parametrize(
    "coefficients, steps, error, words",
    [
        ("polar", 5, ValueError, "presets polar_express"),
        ((1.0, 2.0), 5, ValueError, "got (1.0, 2.0)"),
        ([], 5, ValueError, "got []"),
        ([(1.0, 2.0, float("nan"))], 5, ValueError, "finite in float32"),
        ([(1.0, -1e39, 3.0)], 5, ValueError, "-1e+39"),
        ([(2.0**128, 0.0, 0.0)], 5, ValueError, "finite in float32"),
        ([(1.0, 2.0, 3.0, 4.0)], 5, ValueError, "got [(1.0, 2.0, 3.0, 4.0)]"),
        ([(1.0, 2.0, 3.0), "abc"], 5, ValueError, "abc"),
        ("quintic", 0, ValueError, "got 0"),
        ("quintic", 2.5, TypeError, "2.5"),
        ("quintic", True, TypeError, "True"),
    ],
)
def test_wrong_coefficients_or_steps_are_named(schedules, coefficients, steps, error, words):
    with pytest.raises(error) as raised:
        schedules.resolve_schedule(coefficients, steps)
    assert words in str(raised.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [float, np.float32, np.float64])
def test_coefficients_may_be_numbers_arrays_or_tensors(kernel, schedules, number):
    """Numbers that float32 holds, so that all kinds mean the same."""
    expected = ((3.0, -4.0, 2.0),) * 2
    rows = [list(map(number, row)) for row in expected]
    kinds = [rows, rows[0], np.array(expected), torch.tensor(expected)]
    assert [schedules.resolve_schedule(each, 2) for each in kinds] == [expected] * 4
    p = "up.weight", torch.nn.Parameter(torch.ones(8, 8))
    for each in kinds[1:]:
        (group, *_) = kernel.Muon([p], ns_coefficients=each).param_groups
        assert schedules.resolve_schedule(group["ns_coefficients"], 2) == expected


def test_the_solver_takes_numbers_of_numpy(kernel):
    options = {"lower": 0.125, "safety": 0.25, "cushion": 0.5}
    assert kernel.polar_express(**{k: np.float32(v) for k, v in options.items()}) == kernel.polar_express(**options)


@pytest.mark.parametrize(
    "options",
    [
        *(dict(lower=0.0), dict(lower=1.0), dict(steps=0), dict(cushion=1.0)),
        *(dict(safety=-1.0), dict(safety=float("nan")), dict(safety=float("inf"))),
    ],
    ids=str,
)
def test_solver_refuses_impossible_options(kernel, options):
    with pytest.raises(ValueError, match="polar_express needs"):
        kernel.polar_express(**options)


@pytest.mark.parametrize("options", [{"lower": "1e-3"}, {"safety": True}, {"cushion": None}], ids=str)
def test_solver_takes_numbers(kernel, options):
    ((name, value),) = options.items()
    with pytest.raises(TypeError, match=f"{name} must be a number, got {value!r}"):
        kernel.polar_express(**options)


@pytest.mark.parametrize("steps", ["5", 5.0, True, None])
def test_solver_takes_whole_numbers_of_steps(kernel, steps):
    with pytest.raises(TypeError, match=f"steps must be an integer, got {steps!r}"):
        kernel.polar_express(steps=steps)


def test_a_number_among_triples_is_refused_as_any_other_wrong_schedule(kernel):
    with pytest.raises(ValueError, match="or a sequence of them"):
        kernel.schedules.resolve_schedule([(3.0, -4.0, 2.0), 5.0], 2)
