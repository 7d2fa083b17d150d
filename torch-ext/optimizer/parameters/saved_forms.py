"""Checks whether a state that was read has the parts that it had when it was saved."""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch import Tensor

from ..kernels.formats import dtype_name
from .setting_values import plain_momentum_dtype
from .state import BUFFER, KEYS, MOMENTS, REMAINDER, SCALE, has_remainder

# The part of a state that is there because of a setting.
_PARTS = {"momentum_dtype": SCALE, "second_moment": MOMENTS, "master_weights": REMAINDER}


def check_form(state: Any, name: str, p: Tensor, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise ValueError if settings on which the parts of a state depend differ, and its parts are not the saved ones.

    `saved` and `current` are the groups of `p` in the file and here. torch.distributed.checkpoint reads what an
    optimizer has, so 8-bit codes without their scales would be taken for values. With full_state_dict, parts that the
    file lacks stay as they are here, and others are not sharded. A state without any part is not checked.
    """
    if not isinstance(state, Mapping) or saved.get("use_muon", current["use_muon"]) != current["use_muon"]:
        return
    there, here = (_asked_for(p, {**current, **group}) for group in (saved, {}))
    differing = [setting for setting in there if there[setting] != here[setting]]
    read = _parts_read(state)
    if read and any((_PARTS[each] in read, _PARTS[each] in state) != (there[each], there[each]) for each in differing):
        before, now = (", ".join(f"{each}={of[each]!r}" for each in differing) for of in (saved, current))
        raise ValueError(
            f"the state of {name} was saved with {before}, and the optimizer that it was read for has {now}, so what "
            f"was read has other parts: {', '.join(sorted(read))}. Construct the optimizer with {before}, load, and "
            f"then set {now} in its groups"
        )


def rounding(state: Mapping[str, Any], p: Tensor, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return what to say of momentum that seems to be rounded to the dtype that it has here, "" if it does not.

    `dcp.load` copies into the tensors that are there. A file may also have such momentum itself, which kept its dtype
    under `momentum_dtype=None`.
    """
    if BUFFER not in state or "momentum_dtype" not in saved:
        return ""
    setting, read = saved["momentum_dtype"], state[BUFFER].dtype
    there, here = (_momentum_dtype(p, group) for group in (saved, current))
    if torch.int8 in (there, here) or read != here or torch.promote_types(read, there) == read:
        return ""
    return (
        f"is {read}, and its group was saved with momentum_dtype={setting!r}: if dcp.load has read it, it is rounded "
        "to what this optimizer has. To load it as it was saved, construct the optimizer with "
        f"momentum_dtype={setting!r}"
    )


def kept_dtype(state: Mapping[str, Any], p: Tensor, loaded: Mapping[str, Any]) -> str:
    """Return what to say of momentum that keeps another dtype than a new optimizer's would have, "" if it does not.

    It does so for good where the `loaded` group has `momentum_dtype=None`.
    """
    if BUFFER not in state or loaded["momentum_dtype"] is not None or state[BUFFER].dtype == p.dtype:
        return ""
    kept, new = dtype_name(state[BUFFER].dtype), dtype_name(p.dtype)
    return (
        f"stays {kept}, because the file has it so and momentum_dtype is None; a new optimizer's would be {new}. After "
        f"loading, set momentum_dtype={new!r} in the groups to convert it, or {kept!r} to keep it without this warning"
    )


def _momentum_dtype(p: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    name = plain_momentum_dtype("momentum_dtype", group["momentum_dtype"])
    return p.dtype if name is None else getattr(torch, name)


def _asked_for(p: Tensor, group: Mapping[str, Any]) -> dict[str, bool]:
    """Return, for each setting in `_PARTS`, whether the state of `p` has its part."""
    return {
        "momentum_dtype": group["use_muon"] and group["momentum_dtype"] == "int8",
        "second_moment": group["use_muon"] and group["second_moment"] != "none",
        "master_weights": has_remainder(p, group),
    }


def _parts_read(state: Mapping[str, Any]) -> set[str]:
    """Return the keys of the parts that were read: tensors, and sharded ones, if any are.

    Torch puts an empty dict in the place of what the file lacks.
    """
    read = {key: part for key, part in state.items() if key in KEYS and isinstance(part, Tensor)}
    sharded = {key for key, part in read.items() if hasattr(part, "device_mesh")}
    return sharded or set(read)
