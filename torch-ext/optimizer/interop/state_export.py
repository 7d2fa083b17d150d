"""Export of this package's state to torch.optim.AdamW and torch.optim.Muon."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..muon import Muon
from ..parameters.names import named_parameters
from ..parameters.settings import Group
from ..parameters.state import is_elsewhere

# For each torch optimizer: whether its state is that of Muon's branch here, and its keys. AdamW is a subclass of Adam.
_KEYS = {torch.optim.Adam: (False, ("step", "exp_avg", "exp_avg_sq")), torch.optim.Muon: (True, ("momentum_buffer",))}


def export_state(optimizer: Muon, target: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a state dict for `target.load_state_dict`: the target's groups and settings with state of `optimizer`.

    `target` is a torch.optim.AdamW or torch.optim.Muon over the same parameter objects, in any groups and order. An
    AdamW target gets the exact state of the parameters that AdamW updates here; a torch.optim.Muon target gets the
    momentum of matrices. For all other parameters the target makes a new state at its next step. State that only this
    package has is left out: second moments of NorMuon, and the lower halves of `master_weights`.

    Tensors are copies; `optimizer` and `target` do not change. Raises TypeError for other optimizers, and ValueError
    for parameters that `optimizer` does not have, for 8-bit momentum, and for AMSGrad, whose maxima are unknown here;
    RuntimeError as `Muon.state_dict` does.
    """
    known = next((keys for kind, keys in _KEYS.items() if isinstance(target, kind)), None)
    if not isinstance(optimizer, Muon) or known is None:
        raise TypeError(
            "state is exported from a Muon of this package to a torch.optim.AdamW or torch.optim.Muon, got "
            f"{type(optimizer).__name__} and {type(target).__name__}"
        )
    optimizer.state_dict()  # brings state in line with parameters, and raises if the last step failed halfway
    if any(group.get("amsgrad") for group in target.param_groups):
        raise ValueError("the target has amsgrad=True, whose maxima are unknown here: construct it with amsgrad=False")
    here = {p: (name, group) for group in optimizer.param_groups for name, p in named_parameters(group)}
    exported = target.state_dict()
    parameters = [p for group in target.param_groups for p in group["params"]]
    positions = [position for group in exported["param_groups"] for position in group["params"]]
    strange = [tuple(p.shape) for p in parameters if p not in here]
    if strange:
        raise ValueError(
            f"this optimizer lacks {len(strange)} parameters of the target, the first of shape {strange[0]}: "
            "construct the target with the same parameters, such as model.parameters()"
        )
    state = {position: _state_of(p, *here[p], optimizer, known) for position, p in zip(positions, parameters)}
    return {**exported, "state": {position: values for position, values in state.items() if values}}


def _state_of(p: Tensor, name: str, group: Group, optimizer: Muon, known: tuple[bool, tuple[str, ...]]) -> dict:
    """Return copies of the state tensors that the target uses; {} if the other branch, or other ranks, have `p`."""
    use_muon, keys = known
    if group["use_muon"] != use_muon or p not in optimizer.state or is_elsewhere(p):
        return {}
    values = {key: optimizer.state[p][key] for key in keys}
    if any(value.dtype == torch.int8 for value in values.values()):
        raise ValueError(
            f"momentum of {name} is in 8 bits, which torch does not support: set momentum_dtype=None in its group "
            "first, and the optimizer converts it"
        )
    # A count on a GPU would stay there, and a plain AdamW would wait for it at every step.
    return {key: value.to("cpu", copy=True) if key == "step" else value.clone() for key, value in values.items()}
