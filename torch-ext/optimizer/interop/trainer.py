"""Muon for the Hugging Face Trainer: `Trainer(..., optimizer_cls_and_kwargs=(MuonFactory, {"args": args}))`."""

from __future__ import annotations

import re
from typing import Any, Optional

from torch import nn

from ..muon import Muon
from ..parameters.warned import warn_user
from .layers import Cutting
from .model_groups import Patterns, chosen_groups

# What the Trainer does not decay, besides all of a LayerNorm: `Trainer.get_decay_parameter_names`, transformers 5.23.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
# Fields of TrainingArguments, by the setting of Muon that they are.
_FIELDS = {
    "lr": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "adamw_betas": ("adam_beta1", "adam_beta2"),
    "adamw_eps": ("adam_epsilon",),
}
# Fields for the Trainer's own optimizers, which nothing here corresponds to.
_REFUSED = ("optim_args", "optim_target_modules")
# A factory that nobody has told whether arguments count; None is that they do not.
_UNTOLD: Any = object()


class MuonFactory:
    """What the Trainer makes without arguments and then calls with the model and keyword arguments.

    `Trainer(model, args, optimizer_cls_and_kwargs=(optimizer.MuonFactory, {"args": args}))` trains with the
    `learning_rate`, `weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon` of `args`, as the Trainer's AdamW
    does. The Trainer itself passes a factory the model, whose modules routing needs, and nothing of its arguments.
    `print(trainer.create_optimizer().explain())` shows each parameter before training. Afterwards, in accelerate's
    wrapper, it is `trainer.optimizer.optimizer.explain()`.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        args: Any = _UNTOLD,
        heads: bool = False,
        gate_up: bool = True,
        patterns: Optional[Patterns] = None,
        **settings: Any,
    ) -> Muon:
        """Return a Muon of the model's trainable parameters, in groups of `groups_for`.

        Each layer is one matrix, also where a weight is several, as of fused queries, keys and values. `weight_decay`
        is for what the Trainer decays, and 0 for the rest: all of an `nn.LayerNorm`, and parameters whose name contains
        `bias`, `layernorm` or `rmsnorm`, or has a part that is `norm` or ends in `_norm`. Groups of Muon come first, so
        that the Trainer logs Muon's learning rate.

        Args:
            args: the Trainer's `TrainingArguments`; None: nothing of them counts. Without it nothing does either, and
                one warning names the fields that are ignored.
            heads, gate_up, patterns: as of `groups_for`; by default attentions are not cut by head.
            settings: arguments of `Muon`, which go before what `args` say.

        Raises TypeError for anything but a module and for `args` of another kind, ValueError for `args` with
        `optim_args` or `optim_target_modules`, and what `groups_for` and `Muon` raise.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model is needed, for what its modules are, got {type(model).__name__}")
        if args is _UNTOLD:
            _warn_of_ignored(settings)
        elif args is not None:
            settings = {**_settings_of(args), **settings}
        groups = chosen_groups(model, Cutting(None, heads, gate_up), patterns, _undecayed(model))
        return Muon(sorted(groups, key=lambda group: not group.get("use_muon", False)), **settings)


def _settings_of(args: Any) -> dict[str, Any]:
    """Return what TrainingArguments say of the optimizer, as settings of Muon."""
    missing = [field for fields in _FIELDS.values() for field in fields if not hasattr(args, field)]
    if missing:
        raise TypeError(f"args must be the Trainer's TrainingArguments, got {type(args).__name__} without {missing}")
    refused = {field: getattr(args, field) for field in _REFUSED if getattr(args, field, None) is not None}
    if refused:
        raise ValueError(
            f"TrainingArguments have {refused}, which only the Trainer's own optimizers know: give Muon's settings "
            'beside "args"'
        )
    values = {setting: tuple(getattr(args, field) for field in fields) for setting, fields in _FIELDS.items()}
    return {setting: value if len(value) > 1 else value[0] for setting, value in values.items()}


def _warn_of_ignored(settings: dict[str, Any]) -> None:
    ignored = [field for setting, fields in _FIELDS.items() if setting not in settings for field in fields]
    if ignored:
        warn_user(
            f"the Trainer tells MuonFactory nothing of its TrainingArguments: {', '.join(ignored)} do not count. Write "
            'optimizer_cls_and_kwargs=(MuonFactory, {"args": args}), with settings of Muon beside, or "args": None '
            "where they shall not count"
        )


def _undecayed(model: nn.Module) -> set[str]:
    """Return the names of the parameters that the Trainer does not decay; one with several names goes by its first."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    return {name for name, _ in model.named_parameters() if name.startswith(inside) or _UNDECAYED.search(name.lower())}
