"""Steps, and what an optimizer tells of the last one, do not make the host wait for the device."""

from __future__ import annotations

import pytest
import torch

from tests.support.narrow_device import KINDS, narrow_device

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.parametrize("kind", KINDS)]


def test_a_report_of_clipped_heads_waits_for_nothing_else(portable_kernel, kind):
    """The counts come while the host goes on."""
    told = []
    with narrow_device(portable_kernel, kind) as narrow:
        weights = [(f"attn.{role}_proj.weight", torch.ones(16, 8).to(narrow.device)) for role in "qk"]
        clip = {"threshold": 1.0, "head_dim": 8, "report": lambda *counts: told.append(counts)}
        optimizer = portable_kernel.Muon(weights, qk_clip=clip)
        for largest in ([4.0, 0.5], [4.0, 2.0], [0.0, 0.0]):
            optimizer.observe_qk_logits("attn", torch.tensor(largest).to(narrow.device))
            before = narrow.waits
            optimizer.step()
            assert narrow.waits == before
    assert told == [(1, 0), (2, 0)]


@pytest.mark.parametrize("has_gradients", [True, False])
def test_metrics_of_scaled_gradients_wait_for_nothing(portable_kernel, kind, has_gradients):
    """Not even where there are none: of a model without vectors, and after zero_grad."""
    with narrow_device(portable_kernel, kind) as narrow:
        p = torch.ones(4, 8).to(narrow.device)
        optimizer = portable_kernel.Muon([("weight", p)], capturable=True)
        optimizer.grad_scale = torch.full((), 8.0, device=narrow.device)
        optimizer.found_inf = torch.zeros(1, device=narrow.device)
        p.grad = torch.ones_like(p) * 8.0
        optimizer.step()
        if not has_gradients:
            optimizer.zero_grad()
        before = narrow.waits
        metrics = optimizer.metrics()
        assert narrow.waits == before
        assert metrics["muon_gradient_norm"].item() == pytest.approx(has_gradients * 32**0.5)
        assert metrics["fallback_gradient_norm"].item() == 0
