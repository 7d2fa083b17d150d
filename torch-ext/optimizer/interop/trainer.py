"""Muon for the Hugging Face Trainer: `Trainer(..., optimizer_cls_and_kwargs=(MuonFactory, {"args": args}))`."""

from __future__ import annotations

import re
from typing import Any, Optional

from torch import nn

from ..kernels.user_warnings import warn_user
from ..muon import Muon
from .models.groups import Patterns, chosen_groups
from .models.layers import Cutting

# Names that the Trainer does not decay, besides LayerNorms: `Trainer.get_decay_parameter_names`, transformers 5.23.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
# The fields of TrainingArguments for each setting of Muon.
_FIELDS = {
    "lr": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "adamw_betas": ("adam_beta1", "adam_beta2"),
    "adamw_eps": ("adam_epsilon",),
}
# Fields for the Trainer's own optimizers, without a counterpart here.
_REFUSED = ("optim_args", "optim_target_modules")
# The default of `args`: not given. None means that TrainingArguments are ignored on purpose.
_NOT_GIVEN: Any = object()


class MuonFactory:
    """A factory that the Trainer creates without arguments and then calls with the model and keyword arguments.

    `Trainer(model, args, optimizer_cls_and_kwargs=(optimizer.MuonFactory, {"args": args}))` trains with the
    `learning_rate`, `weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon` of `args`, as the Trainer's AdamW
    does. The Trainer passes only the model to a factory, not its own arguments, so give them as shown.
    `print(trainer.create_optimizer().explain())` shows each parameter before training. Afterwards accelerate wraps the
    optimizer: call `trainer.optimizer.optimizer.explain()`.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        args: Any = _NOT_GIVEN,
        heads: bool = False,
        gate_up: bool = True,
        patterns: Optional[Patterns] = None,
        **settings: Any,
    ) -> Muon:
        """Return a Muon for the model's trainable parameters, in the groups of `groups_for`.

        Fused weights are cut into queries, keys and values, and into gate and up, but not by attention head.
        `weight_decay` applies to the parameters that the Trainer decays; it is 0 for those of `nn.LayerNorm`, and for
        names that contain `bias`, `layernorm` or `rmsnorm`, or have a component that is `norm` or ends in `_norm`.
        Muon's groups come first, so the Trainer logs Muon's learning rate.

        Args:
            args: the Trainer's `TrainingArguments`. None ignores them; without `args` they are ignored too, and one
                warning names the fields.
            heads, gate_up, patterns: as in `groups_for`, except that `heads` is False by default.
            settings: arguments of `Muon`, which take precedence over `args`.

        Raises TypeError for anything but a module and for `args` of another kind, ValueError for `args` with
        `optim_args` or `optim_target_modules`, and the errors of `groups_for` and `Muon`.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model is needed, because its modules decide the groups, got {type(model).__name__}")
        if args is _NOT_GIVEN:
            _warn_of_ignored(settings)
        elif args is not None:
            settings = {**_settings_of(args), **settings}
        groups = chosen_groups(model, Cutting(None, heads, gate_up), patterns, _undecayed(model))
        groups.sort(key=lambda group: not group.get("use_muon", False))
        return Muon(groups, **settings)


def _settings_of(args: Any) -> dict[str, Any]:
    """Return the optimizer fields of TrainingArguments as settings of Muon."""
    missing = [field for fields in _FIELDS.values() for field in fields if not hasattr(args, field)]
    if missing:
        raise TypeError(f"args must be the Trainer's TrainingArguments, got {type(args).__name__} without {missing}")
    refused = {field: getattr(args, field) for field in _REFUSED if getattr(args, field, None) is not None}
    if refused:
        raise ValueError(
            f"TrainingArguments have {refused}, which only the Trainer's own optimizers use: give Muon's settings "
            'next to "args"'
        )
    values = {setting: tuple(getattr(args, field) for field in fields) for setting, fields in _FIELDS.items()}
    return {setting: value if len(value) > 1 else value[0] for setting, value in values.items()}


def _warn_of_ignored(settings: dict[str, Any]) -> None:
    """Warn of the fields of TrainingArguments that no setting replaces."""
    ignored = [field for setting, fields in _FIELDS.items() if setting not in settings for field in fields]
    if ignored:
        warn_user(
            f"the Trainer does not pass its TrainingArguments to MuonFactory: {', '.join(ignored)} are ignored. Write "
            'optimizer_cls_and_kwargs=(MuonFactory, {"args": args}), with settings of Muon next to it, or "args": None '
            "to ignore them on purpose"
        )


def _undecayed(model: nn.Module) -> set[str]:
    """Return the names of the parameters that the Trainer does not decay; for tied ones the first name counts."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    return {name for name, _ in model.named_parameters() if name.startswith(inside) or _UNDECAYED.search(name.lower())}
