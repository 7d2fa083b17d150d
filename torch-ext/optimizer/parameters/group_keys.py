"""Checks of the keys of a user's group: without them a misspelt key would be ignored silently."""

from __future__ import annotations

import functools
from difflib import get_close_matches
from typing import Any, Mapping

from ..kernels.user_warnings import warn_user
from .argument_checks import ALIKE, ELSEWHERE, REFUSED
from .settings import SETTINGS

# Keys of this package besides settings: those that users write, and those of loaded state dicts.
_WRITTEN = ("use_muon", "use_fallback", "algorithm", "role", "reason")
_OURS = (*_WRITTEN, "rounding_step", "state_format", "build")
# Arguments of the constructor that are no settings of groups.
_OF_ALL = ("cuda_graphs", "exchange", "qk_clip", "release_grads")
# Keys that other libraries write into groups. No step reads them, but some tell schedulers how to set `lr`.
_OTHERS: dict[str, tuple[str, ...]] = {
    "torch.optim.Optimizer": ("params", "param_names"),
    "torch.optim.AdamW, Muon": ("betas", "fused", "foreach", "use_addmm", "decoupled_weight_decay"),
    "torch's schedulers": ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"),
    "timm, by layer decay": ("lr_scale",),
    "mmengine": ("lr_mult", "decay_mult"),
    "DINOv2": ("lr_multiplier", "wd_multiplier", "is_last_layer"),
    "ultralytics": ("param_group",),
    "Megatron": ("wd_mult", "lr_mult", "pre_wd_mult", "pre_lr_mult", "start_wd", "end_wd", "default_config"),
    "Megatron, of parallelism": ("is_expert_parallel", "is_engram_parallel"),
    "Megatron, of models": ("is_decoupled_lr", "is_vision_model_param"),
    "DeepSpeed, by which it splits experts": ("name", "moe"),
    "Lightning, for its LearningRateMonitor": ("name",),
    "SAM, which gives its groups to the optimizer": ("rho", "adaptive"),
    "loops and loggers": ("group_name", "warmup_lr"),
}
# From which likeness on, between 0 and 1, a new key is taken for a setting: schedulers may have a `max_weight_decay`.
_MISSPELT = 0.87
_KNOWN = {*SETTINGS, *_OURS, *(key for keys in _OTHERS.values() for key in keys)}


def check_keys(group: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown key beside `params` in a user's group; the error names the most similar key.

    Keys that begin with an underscore are the user's own.
    """
    for key, value in group.items():
        if key in REFUSED and value:
            raise ValueError(f"{key}={value!r} in a parameter group is not supported: leave it out")
        # torch's Adam writes it, and adds decay to gradients.
        if key == "decoupled_weight_decay" and value is False and group.get("weight_decay") != 0:
            raise ValueError(
                "decoupled_weight_decay=False in a parameter group is not supported: weight_decay never enters the "
                "gradients here. Leave it out, and choose weight_decay as for AdamW"
            )
        if _may_be_there(key):
            continue
        meant = _meant(str(key), ALIKE) or f"it has {', '.join(sorted({*SETTINGS, *_WRITTEN}))}."
        raise ValueError(f"a parameter group has no {key!r}: {meant} A key of your own begins with an underscore")


def warn_of_misspelt_keys(group: Mapping[str, Any]) -> None:
    """Warn of each key of a group of an optimizer that is made, if it is unknown and resembles one that steps read.

    Other unknown keys may be those of a scheduler, which writes its own into groups.
    """
    for key in group:
        meant = "" if _may_be_there(key) else _meant(str(key), _MISSPELT)
        if meant:
            warn_user(f"the key {key!r} of a parameter group does nothing: {meant}")


def _may_be_there(key: Any) -> bool:
    return key in _KNOWN or key in REFUSED or str(key).startswith("_")


@functools.cache  # schedulers that change a setting in every step have their keys looked up in every step
def _meant(key: str, alike: float) -> str:
    """Return what to write instead of an unknown key; "" if no key is so much `alike`."""
    if key in ELSEWHERE:
        return f"write {ELSEWHERE[key]}."
    if key in _OF_ALL:
        return f"{key} is for all groups, write it in Muon(...)."
    similar = get_close_matches(key, [*SETTINGS, *_OURS], n=1, cutoff=alike)
    return f"did you mean {similar[0]!r}?" if similar else ""
