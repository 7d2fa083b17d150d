"""Positions in QK-clip's `layers` count the parameters in the order in which the user gave them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import Parameter

# Muon updates the square ones and AdamW the others, so an optimizer's groups have another order.
SHAPES = {
    "wte.weight": (32, 8), "norm.weight": (8,), "attn.to_q.weight": (8, 8), "attn.to_q.bias": (8,),
    "attn.to_k.weight": (8, 8), "attn.to_v.weight": (8, 8), "mlp.up.weight": (8, 8),
}  # fmt: skip
NAMES = list(SHAPES)
PAIR = NAMES.index("attn.to_q.weight"), NAMES.index("attn.to_k.weight")
SCALED = {"attn.to_q.weight", "attn.to_q.bias", "attn.to_k.weight"}


def parameters() -> dict[str, Parameter]:
    return {name: Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}


def muon(kernel, params, pair=PAIR):
    return kernel.Muon(params, lr=0.0, qk_clip={"head_dim": 4, "threshold": 100, "layers": [pair]})


def scaled_by(optimizer) -> set[str]:
    """The names of the parameters that a step with large logits scales; its learning rate is 0."""
    optimizer.observe_qk_logits(0, torch.tensor([400.0, 400.0]))
    optimizer.step()
    groups = optimizer.param_groups
    return {name for g in groups for name, p in zip(g["param_names"], g["params"]) if not bool((p == 1).all())}


FORMS = {
    "as pairs": lambda named: named.items(),
    "as two groups": lambda named: [{"params": list(named.items())[:3]}, {"params": list(named.items())[3:]}],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_positions_are_those_of_the_parameters_as_given(kernel, form):
    assert scaled_by(muon(kernel, form(parameters()))) == SCALED


def test_positions_need_no_names(kernel):
    """The bias is not known to belong to the queries then."""
    names = scaled_by(muon(kernel, parameters().values()))
    assert names == {f"param_{position}" for position in PAIR}


def loaded(kernel, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def with_a_group_more(kernel, optimizer):
    optimizer.add_param_group({"params": [(f"more.{i}.weight", Parameter(torch.ones(8, 8 - i))) for i in range(8)]})
    return optimizer


def with_other_parameters(kernel, optimizer):
    for group in optimizer.param_groups:
        group["params"] = [Parameter(p.detach().clone()) for p in group["params"]]
    return loaded(kernel, optimizer)


def without_the_first(kernel, optimizer):
    for group in optimizer.param_groups:
        kept = [i for i, name in enumerate(group["param_names"]) if name != NAMES[0]]
        group.update({key: [group[key][i] for i in kept] for key in ("params", "param_names")})
    return optimizer


LATER = {
    "deepcopy": lambda kernel, optimizer: copy.deepcopy(optimizer),
    "pickle": lambda kernel, optimizer: pickle.loads(pickle.dumps(optimizer)),
    "a loaded state": loaded,
    "a group more": with_a_group_more,
    "other parameters": with_other_parameters,
    "a parameter less": without_the_first,
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
def test_positions_keep_their_meaning_whatever_happens_later(kernel, later):
    assert scaled_by(later(kernel, muon(kernel, parameters().items()))) == SCALED


@pytest.mark.parametrize("position", [len(NAMES), -1])
def test_a_position_without_a_parameter_is_refused(kernel, position):
    with pytest.raises(ValueError, match=rf"layers of qk_clip have the position {position}, and 7 parameters were"):
        muon(kernel, parameters().items(), (PAIR[0], position))
