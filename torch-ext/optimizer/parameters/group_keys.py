"""Checks of the keys of a user's group: without them a misspelt key would be ignored silently."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Mapping

from .argument_checks import ALIKE, ELSEWHERE, REFUSED
from .settings import SETTINGS

# Keys of this package besides settings: those that users write, and those of loaded state dicts.
_WRITTEN = ("use_muon", "use_fallback", "algorithm", "role", "reason")
_OURS = (*_WRITTEN, "rounding_step", "state_format", "build")
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
        if key in _KNOWN or key in REFUSED or str(key).startswith("_"):
            continue
        meant = _meant(str(key))
        raise ValueError(f"a parameter group has no {key!r}: {meant} A key of your own begins with an underscore")


def _meant(key: str) -> str:
    if key in ELSEWHERE:
        return f"write {ELSEWHERE[key]}."
    similar = get_close_matches(key, [*SETTINGS, *_OURS], n=1, cutoff=ALIKE)
    return f"did you mean {similar[0]!r}?" if similar else f"it has {', '.join(sorted({*SETTINGS, *_WRITTEN}))}."
