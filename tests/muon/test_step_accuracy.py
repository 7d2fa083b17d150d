"""How much of `orthogonalize`'s accuracy a step keeps."""

from __future__ import annotations

import pytest
import torch

from tests.support.spectra import SPECTRA, composed, with_spectrum

ROWS, COLS = 64, 160


def distance(kernel, X: torch.Tensor, G: torch.Tensor) -> float:
    """Return how far X is from the default schedule's polynomial of G, relative to that."""
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    U, sigma, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    exact = U @ torch.diag(composed(schedule, sigma / sigma.norm())) @ Vh
    return ((X.double() - exact).norm() / exact.norm()).item()


def direction_of_a_step(kernel, G: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return what a step subtracts: the iteration's result for G alone, without a multiplier."""
    p = torch.nn.Parameter(torch.zeros_like(G))
    p.grad = G.clone()
    alone = dict(lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=lambda rows, cols: 1.0)
    kernel.Muon([("up.weight", p)], ns_dtype=dtype, **alone).step()
    return -p.detach()


@pytest.mark.parametrize("spectrum", ["flat", "power_law", "log_spaced", "gaussian"])
@pytest.mark.parametrize("dtype, most", [("bfloat16", 1.5), ("float16", 1.05), ("float32", 1.05)])
def test_a_step_errs_as_orthogonalize_does_or_rounds_once_more(kernel, spectrum, dtype, most):
    """In bfloat16, G is rounded before and after it is divided by its norm: √2 of the error if there were no other one.

    The rest is for chance: the mean of four matrices, none of whose norms is a power of two.
    """
    steps = calls = 0.0
    for seed in range(4):
        G = (1.1 + 0.13 * seed) * with_spectrum(SPECTRA[spectrum](ROWS), ROWS, COLS, seed).float()
        steps += distance(kernel, direction_of_a_step(kernel, G, dtype), G)
        calls += distance(kernel, kernel.orthogonalize(G, dtype=getattr(torch, dtype)), G)
    assert steps <= most * calls
