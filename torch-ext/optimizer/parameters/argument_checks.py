"""Checks of parameters, arguments, closures and files for common mistakes; errors say what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from numbers import Real
from reprlib import repr as shortened
from typing import Any, Callable

from torch import Tensor, nn

from ..kernels.user_warnings import warn_user
from .sequences import is_sequence

_TWO_GROUPS = "[{'params': ..., 'use_muon': True}, {'params': ..., 'use_muon': False}]"
_ALL_PARAMS = f"params, all of them: model.named_parameters(), or {_TWO_GROUPS}"
# Arguments of other optimizers, and their names here.
ELSEWHERE = {
    "adam_lr": "adamw_lr",
    "aurora": 'equalize="experimental_aurora"',
    "adamw_params": _ALL_PARAMS,
    **dict.fromkeys(("adam_weight_decay", "adamw_wd", "fallback_wd"), "adamw_weight_decay"),
    "backend_steps": "ns_steps",
    "betas": "adamw_betas for the parameters that AdamW updates, and momentum for Muon's",
    "beta": "momentum",
    "epsilon": "eps",
    "fallback_lr": "adamw_lr",
    "hyperball": "experimental_hyperball=True",
    "is_muon": "use_muon in the group, or is_muon in Muon(...)",
    "learning_rate": "lr",
    "lr_adamw": "adamw_lr",
    "lr_muon": "lr",
    "mu": "momentum",
    "muon_lr": "lr",
    "muon_params": _ALL_PARAMS,
    "named_parameters": "them first, or params=...",
    "ns_eps": "eps",
    "warmup_steps": "a scheduler for the optimizer, such as torch.optim.lr_scheduler.LinearLR",
    "wd": "weight_decay",
    "weight_decay_method": "decay_mode",
    "process_group": "exchange=ExchangeOptions(process_group=...)",
    "split_rows": "split_rows in the group of the weight: Muon([{'params': ..., 'split_rows': ...}])",
    "use_muon": "use_muon in a group, or is_muon=(a function of name and parameter)",
    "dtype": "ns_dtype",
}
# Arguments of torch.optim.AdamW that would change a step, and Keller Jordan's earlier choice of an iteration; in groups
# only False is accepted.
REFUSED = ("amsgrad", "differentiable", "backend")
# From which likeness on, between 0 and 1, a name may be meant by another.
ALIKE = 0.75


def params_as_list(params: Any, least: int = 0) -> list[Any]:
    """Return the `params` of an optimizer or a group as a list.

    Raises TypeError, which says what to write instead, for anything else; ValueError for fewer than `least` entries.
    """
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        raise TypeError(f"params are a module, {type(params).__name__}: write its named_parameters()")
    if isinstance(params, Mapping):
        instead = "[group], a list of groups" if "params" in params else "its items(), pairs of name and parameter"
        raise TypeError(f"params are a dict with the keys {', '.join(map(str, list(params)[:3]))}: write {instead}")
    if isinstance(params, (set, frozenset)):  # the items of a dict, which keep their order, are not such a set
        raise TypeError("params must keep their order between runs: give a list, not a set")
    if isinstance(params, (Tensor, str)) or not isinstance(params, Iterable):
        raise TypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, or of (name, parameter) "
            f"pairs, but got {type(params).__name__}: write model.named_parameters(), or [parameter] for a single one"
        )
    params = list(params)
    if len(params) < least:
        raise ValueError(
            "params are empty: the model has no parameters, or all of them are frozen, or a generator, such as "
            "model.named_parameters(), has been read before; make a new one, or a list"
        )
    return params


def check_takes(key: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise TypeError if the function of a setting cannot be called with these arguments, by position."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C that does not say
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{key} is called with {' and '.join(arguments)}, and {name} takes {signature}") from None


def check_closure(closure: Any) -> None:
    """Raise TypeError if `closure` is a loss or anything else that cannot be called."""
    if closure is not None and not callable(closure):
        raise TypeError(
            f"step takes a function that computes the loss, or nothing, got {type(closure).__name__}: write "
            "loss.backward() and then optimizer.step()"
        )


def check_is_dict(state_dict: Any) -> None:
    """Raise TypeError unless `state_dict` is a mapping. Its keys are checked later, because hooks may change them."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"need what optimizer.state_dict() returns, got {type(state_dict).__name__}: write torch.load(path) for a "
            "file, and optimizer.state_dict() for an optimizer"
        )


def check_state_dict(state_dict: Any) -> None:
    """Raise TypeError or ValueError for anything but what `state_dict()` of an optimizer returns."""
    check_is_dict(state_dict)
    if not {"state", "param_groups"} <= set(state_dict):
        keys = ", ".join(map(str, list(state_dict)[:6]))
        raise ValueError(
            "need what state_dict() of an optimizer returns, with the keys state and param_groups, got "
            f"{f'the keys {keys}' if keys else 'no keys'}: of a whole checkpoint, give the optimizer's part"
        )
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict with the state of each parameter, got {shortened(state)}")
    if not is_sequence(groups) or not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise TypeError(f"param_groups must be a list of dicts with params, got {shortened(groups)}")
    for group in groups:
        for key in ("params", "param_names"):
            if key in group and not is_sequence(group[key]):
                raise TypeError(f"{key} of a saved group must be a list, got {shortened(group[key])}")
    params = [number for group in groups for number in group["params"]]
    if not all(isinstance(number, (int, str)) for number in params):
        raise TypeError(f"params of saved groups must be numbers or names, got {shortened(params)}")
    if state and params and state.keys().isdisjoint(params):
        keys, wanted = (", ".join(map(repr, list(each)[:3])) for each in (state, params))
        raise ValueError(
            f"state has the keys {keys}, and params of the groups are {wanted}: none has a state. JSON makes strings "
            "of numbers"
        )


def with_known_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor whose error for an unknown argument names the argument that may be meant.

    It warns if the third positional argument looks like a momentum, which other optimizers have in that place.
    """
    known = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **arguments: Any) -> None:
        for name in (name for name in arguments if name not in known):
            meant = ELSEWHERE.get(name) or " or ".join(get_close_matches(name, known, cutoff=ALIKE))
            advice = ": leave it out" if name in REFUSED else f": write {meant}" if meant else ""
            raise TypeError(f"{type(self).__name__} has no argument {name}{advice}")
        if len(args) == 3 and "momentum" not in arguments and _looks_like_momentum(args[2]):
            warn_user(
                f"the third argument, {args[2]}, is weight_decay, as in torch.optim.Muon: write momentum={args[2]} or "
                f"weight_decay={args[2]}, whichever is meant"
            )
        init(self, *args, **arguments)

    return checked


def _looks_like_momentum(value: Any) -> bool:
    """Whether a number is typical for a momentum: decays are smaller, or at least 1 with small learning rates."""
    return isinstance(value, Real) and 0.85 <= value < 1
