"""What `Muon` would do with parameters, said before there is an optimizer."""

from __future__ import annotations

import inspect
from typing import Any, Iterable, Optional, Union

from torch import Tensor

from ...explain.routes import route_in_group
from ...explain.table import Explanation
from ...learning_rate import check_update_rms
from ...muon import Muon
from ...parameters.advice import advice, remarks
from ...parameters.argument_checks import params_as_list
from ...parameters.checks import check_parameter
from ...parameters.matrices import is_stack
from ...parameters.routing import IsMuon, Route, check_is_muon, decide, unique_parameters
from ...parameters.settings import OF_GROUPS, SETTINGS, Group

# Muon's arguments that affect a parameter's branch, matrices and multiplier.
_ROUTING = (
    "adjust_lr_fn", "update_rms", "experimental_hyperball", "conv_mode", "normalize_spatial", "expert_keys", "stacked",
)  # fmt: skip
_DEFAULTS = {**{key: inspect.signature(Muon).parameters[key].default for key in _ROUTING}, **OF_GROUPS}


def route(
    params: Iterable[Union[Tensor, tuple[str, Tensor]]], *, is_muon: Optional[IsMuon] = None, **settings: Any
) -> Explanation:
    """Return what `Muon(params, ...).explain()` says about routing, without making an optimizer.

    The columns of learning rates, state, work and kernels are missing.

    `params` are tensors or `(name, tensor)` pairs; tied parameters come once. Of Muon's arguments it accepts `is_muon`,
    `adjust_lr_fn`, `update_rms`, `experimental_hyperball`, `conv_mode`, `normalize_spatial`, `expert_keys` and
    `stacked`. Raises TypeError for others, and TypeError or ValueError for values and parameters that `Muon` refuses.
    """
    check_is_muon(is_muon)
    unknown = [key for key in settings if key not in _ROUTING]
    if unknown:
        raise TypeError(f"the settings of route are {', '.join(_ROUTING)}, got {', '.join(unknown)}")
    for key, value in settings.items():
        SETTINGS[key].check(key, value)
    group = {**_DEFAULTS, **settings}
    check_update_rms(group["update_rms"], group["adjust_lr_fn"])
    parameters = unique_parameters(params_as_list(params))
    for names, p in parameters:
        check_parameter(names[0], p, use_muon=False)
    rows = [preview(names, p, settings, is_muon) for names, p in parameters]
    return Explanation(rows, advice(rows) + remarks(rows))


def preview(names: list[str], p: Tensor, settings: Group, is_muon: Optional[IsMuon] = None) -> Route:
    """Return the row of a parameter in a group with these settings; the others have their defaults."""
    group = {**_DEFAULTS, **settings}
    if "use_muon" in group:
        branch, reason = "muon" if group["use_muon"] else "adamw", group["reason"]
    else:
        branch, reason = decide(names, p, is_muon, is_stack(names[0], p.ndim, group["expert_keys"], group["stacked"]))
    if branch == "muon":
        return route_in_group(names[0], p, reason, group)
    return Route(names[0], tuple(p.shape), group.get("fallback", branch), reason)
