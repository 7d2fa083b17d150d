"""Muon for the Hugging Face Trainer: `Trainer(..., optimizer_cls_and_kwargs=(MuonFactory, {"lr": 1e-3}))`."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ..muon import Muon

# What the Trainer does not decay, besides all of a LayerNorm: `Trainer.get_decay_parameter_names`, transformers 5.23.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


class MuonFactory:
    """What the Trainer makes without arguments and then calls with the model and keyword arguments.

    The Trainer passes a factory the model, whose names routing needs, instead of groups of unnamed parameters. Its own
    `learning_rate`, `weight_decay` and betas it does not pass on: give them as settings.
    """

    def __call__(self, model: nn.Module, **settings: Any) -> Muon:
        """Return a Muon of the model's trainable parameters, by name, in the groups that the Trainer would make.

        `settings` are arguments of `Muon`; `weight_decay` is for the parameters that the Trainer decays, and is 0 for
        the others. Raises TypeError for anything but a module, and what `Muon` raises.
        """
        return Muon(decay_groups(model), **settings)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the trainable parameters of `model` as two groups of `(name, parameter)`: decayed, and not.

    Not decayed are parameters of `nn.LayerNorm`, and those whose name contains `bias`, `layernorm` or `rmsnorm`, or a
    part that is `norm` or ends in `_norm`. A parameter with several names goes by its first, as in the Trainer. Also
    for an optimizer that the Trainer takes ready-made: `optimizers=(Muon(decay_groups(model)), None)`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is needed, for the names of its parameters, got {type(model).__name__}")
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    decayed, rest = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            undecayed = name.startswith(inside) or _UNDECAYED.search(name.lower())
            (rest if undecayed else decayed).append((name, p))
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
