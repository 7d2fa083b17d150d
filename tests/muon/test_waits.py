"""What a step and its optimizer tell of the last one, read while the host runs ahead of the device."""

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
