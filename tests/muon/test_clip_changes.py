"""Logits that QK-clip has observed stay with their attention, whatever becomes of the others before the step."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

OBSERVED = "layers.1.attn"


def attention(layer: int, rows: int = 8) -> list[tuple[str, Parameter]]:
    names = (f"layers.{layer}.attn.{which}_proj.weight" for which in "qk")
    return [(name, Parameter(torch.ones(rows, 12))) for name in names]


def reversed_(optimizer) -> None:
    for key in ("params", "param_names"):
        optimizer.param_groups[0][key].reverse()


def without_the_first(optimizer) -> None:
    for key in ("params", "param_names"):
        del optimizer.param_groups[0][key][:2]


def joined_by_another(optimizer) -> None:
    optimizer.add_param_group({"params": attention(2)})


def joined_by_a_bias(optimizer) -> None:
    optimizer.add_param_group({"params": [(f"{OBSERVED}.q_proj.bias", Parameter(torch.ones(8)))]})


def joined_by_one_of_its_number(optimizer) -> None:
    """Then neither of them has the number as its key."""
    optimizer.add_param_group({"params": [(f"decoder.{name}", p) for name, p in attention(1)]})


CHANGES = [reversed_, without_the_first, joined_by_another, joined_by_a_bias, joined_by_one_of_its_number]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_change_of_the_parameters_keeps_observed_logits(kernel, change, is_late):
    named = [*attention(0), *attention(1)]
    optimizer = kernel.Muon(named, lr=0.0, qk_clip={"head_dim": 4, "threshold": 10.0})
    if not is_late:
        change(optimizer)
    optimizer.observe_qk_logits(OBSERVED, torch.tensor([5.0, 40.0]))
    if is_late:
        change(optimizer)
    optimizer.step()
    for name, p in named:
        expected = [1.0] * 4 + [0.5 if name.startswith(OBSERVED) else 1.0] * 4
        assert p[:, 0].tolist() == expected, name


def test_logits_of_other_heads_are_forgotten(kernel):
    """The attention has its name still, and one head less: nobody knows whose logits they were."""
    optimizer = kernel.Muon(attention(1), lr=0.0, qk_clip={"head_dim": 4, "threshold": 10.0})
    optimizer.observe_qk_logits(OBSERVED, torch.tensor([40.0, 40.0]))
    params = optimizer.param_groups[0]["params"] = [p for _, p in attention(1, rows=4)]
    optimizer.step()
    assert all((p == 1).all() for p in params)
