"""The Motif kernel's iteration by its names, beside its golden results."""

import json

import numpy as np
import pytest
import torch

from tests.support.spectra import composed


def coefficient_error(ours, theirs):
    """Return by how much p may differ because the kernel's solver keeps few digits of its last coefficients.

    Values are at most about 1. A step then differs by at most the sum of its coefficients' errors, which each step
    after it multiplies by at most its first coefficient.
    """
    error = 0.0
    for one, other in zip(ours, theirs):
        error = one[0] * error + sum(abs(x - y) for x, y in zip(one, other))
    return error


def test_zeropower_gives_the_golden_results(kernel, repository):
    folder = repository / "tests/golden"
    schedules = json.loads((folder / "coefficients.json").read_text())["schedules"]
    (theirs,) = (each["coefficients"] for each in schedules if each["id"] == "schedule_l0.001_n10_s0.01_c0.02")
    cases = json.loads((folder / "newton_schulz.json").read_text())["cases"]
    arrays = np.load(folder / "newton_schulz.npz", allow_pickle=False)
    compared = set()
    for case in (case for case in cases if case["algorithm"] == "motif"):
        G = torch.from_numpy(arrays[f"in/{case['input']}"]).double()
        expected = torch.from_numpy(arrays[f"out/{case['id']}"]).double()
        name = "zeropower_via_newtonschulz5" + "_batched" * (G.ndim == 3)
        steps = case["options"]["steps"]
        ours = kernel.schedules.resolve_schedule(kernel.polar_express(steps=10), steps)
        rounded = coefficient_error(ours, kernel.schedules.resolve_schedule(theirs, steps))
        actual = getattr(kernel.compat, name)(G, steps)
        for one, reference, matrix in zip(*(x.reshape(-1, *G.shape[-2:]) for x in (actual, expected, G))):
            # The kernel divides by norm + eps, we by the larger of the two; p acts on the singular values.
            sigma = torch.linalg.svdvals(matrix)
            small, large = sorted((matrix.norm().item(), 1e-7))
            shifted = (composed(ours, sigma / large) - composed(ours, sigma / (small + large))).norm()
            rounding = case["tol_rel_float64"] * expected.norm() + rounded * min(matrix.shape) ** 0.5
            assert (one - reference).norm() <= shifted + rounding, case["id"]
        compared.add((name, steps > 10))
    assert len(compared) == 3  # no golden batch has more than ten steps


def test_zeropower_keeps_its_argument_and_refuses_other_dimensions(kernel):
    G = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = G.clone()
    assert kernel.compat.zeropower_via_newtonschulz5(G, 5).dtype == torch.bfloat16 and torch.equal(G, before)
    with pytest.raises(ValueError, match=r"need a tensor of 2 dimensions, got \(1, 6, 9\)"):
        kernel.compat.zeropower_via_newtonschulz5(G[None], 5)
    with pytest.raises(ValueError, match=r"need a tensor of 3 dimensions, got \(6, 9\)"):
        kernel.compat.zeropower_via_newtonschulz5_batched(G, 5)


def test_zeropower_divides_by_a_norm_of_1e_minus_7_at_least(kernel):
    """A power of two in larger norms changes no bit."""
    G = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    G /= G.norm()
    whole, smaller, smallest = (kernel.compat.zeropower_via_newtonschulz5(G * 2.0**k, 5) for k in (0, -22, -40))
    assert torch.equal(whole, smaller) and smallest.norm() < 0.1 * whole.norm()
