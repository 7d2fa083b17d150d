"""This package's state as one of torch's optimizers takes it over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..muon import Muon
from ..parameters.groups import names_of
from ..parameters.settings import Group

# What torch's optimizers have of a parameter, by the branch that has the same here.
# AdamW is a kind of Adam.
_KEYS = {torch.optim.Adam: (False, ("step", "exp_avg", "exp_avg_sq")), torch.optim.Muon: (True, ("momentum_buffer",))}


def export_state(optimizer: Muon, target: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a state dict for `target.load_state_dict`: its groups and settings, with state of `optimizer`.

    `target` is a torch.optim.AdamW or a torch.optim.Muon over parameters of `optimizer`, which are told by identity, in
    whatever groups: nothing need be guessed of order or names. A parameter of AdamW here has there what it has here,
    exactly, and a matrix its momentum. Of the others the target makes a new state at its next step: second moments are
    nowhere in Muon. What only this package knows is left out: second moments of NorMuon, and what bfloat16 parameters
    with `master_weights` lack of float32.

    Tensors are copies; nothing of `optimizer` or `target` changes. Raises TypeError for other optimizers, and
    ValueError for parameters that `optimizer` does not have, for momentum in 8 bits, and for AMSGrad, whose maxima are
    unknown here.
    """
    known = next((keys for kind, keys in _KEYS.items() if isinstance(target, kind)), None)
    if not isinstance(optimizer, Muon) or known is None:
        raise TypeError(
            "state is exported from a Muon of this package to a torch.optim.AdamW or torch.optim.Muon, got "
            f"{type(optimizer).__name__} and {type(target).__name__}"
        )
    optimizer.state_dict()  # brings state in line with parameters, and raises after a step that broke off
    if any(group.get("amsgrad") for group in target.param_groups):
        raise ValueError("the target has amsgrad=True, whose maxima are unknown here: construct it with amsgrad=False")
    here = {p: (name, group) for group in optimizer.param_groups for name, p in zip(names_of(group), group["params"])}
    exported = target.state_dict()
    parameters = [p for group in target.param_groups for p in group["params"]]
    positions = [position for group in exported["param_groups"] for position in group["params"]]
    strange = [tuple(p.shape) for p in parameters if p not in here]
    if strange:
        raise ValueError(
            f"{len(strange)} parameters of the target are not this optimizer's, the first of shape {strange[0]}: "
            "construct the target with the same parameters, such as model.parameters()"
        )
    state = {position: _state_of(p, *here[p], optimizer, known) for position, p in zip(positions, parameters)}
    return {**exported, "state": {position: values for position, values in state.items() if values}}


def _state_of(p: Tensor, name: str, group: Group, optimizer: Muon, known: tuple[bool, tuple[str, ...]]) -> dict:
    """Return copies of what the target has of a parameter; nothing where that is another branch's."""
    use_muon, keys = known
    if group["use_muon"] != use_muon or p not in optimizer.state:
        return {}
    values = {key: optimizer.state[p][key] for key in keys}
    if any(value.dtype == torch.int8 for value in values.values()):
        raise ValueError(
            f"momentum of {name} is in 8 bits, which torch has not: set momentum_dtype=None in its group before, and "
            "the optimizer converts it"
        )
    return {key: value.clone() for key, value in values.items()}
