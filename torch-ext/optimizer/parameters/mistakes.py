"""What users pass by mistake in the place of parameters, arguments, closures and files, and what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from numbers import Real
from typing import Any, Callable

from torch import Tensor, nn

from .warned import warn_user

# Arguments of other optimizers, and what they are called here.
_ELSEWHERE = {
    "betas": "adamw_betas, of the parameters that AdamW updates; Muon's own is momentum",
    "beta": "momentum",
    "mu": "momentum",
    "learning_rate": "lr",
    "wd": "weight_decay",
    "process_group": "exchange=ExchangeOptions(process_group=...)",
    "split_rows": "split_rows in the group of the weight: Muon([{'params': ..., 'split_rows': ...}])",
    "use_muon": "use_muon in a group, or is_muon=(a function of name and parameter)",
    "dtype": "ns_dtype",
}


def params_as_list(params: Any, least: int = 0) -> list[Any]:
    """Return `params`, of an optimizer or of one of its groups, as a list; raise where it is something else.

    TypeError says what to write instead; ValueError, that there are less than `least`.
    """
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        raise TypeError(f"params are a module, {type(params).__name__}: write its named_parameters()")
    if isinstance(params, Mapping):
        instead = "a list of groups, [group]," if "params" in params else "its items(), pairs of name and parameter"
        raise TypeError(f"params are a dict with the keys {', '.join(map(str, list(params)[:3]))}: write {instead}")
    if isinstance(params, (set, frozenset)):  # not the items of a dict, which keep theirs
        raise TypeError("params must keep their order between runs: give a list, not a set")
    if isinstance(params, (Tensor, str)) or not isinstance(params, Iterable):
        raise TypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, or of (name, parameter) "
            f"pairs, but got {type(params).__name__}: write model.named_parameters(), or [parameter] for a single one"
        )
    params = list(params)
    if len(params) < least:
        raise ValueError(
            "params are empty: does the model have parameters? A generator, such as model.named_parameters(), is empty "
            "once it has been read: make it anew, or a list of it"
        )
    return params


def check_closure(closure: Any) -> None:
    """Raise TypeError for a loss in the place of a closure, and what else cannot be called."""
    if closure is not None and not callable(closure):
        raise TypeError(
            f"step takes a function that computes the loss, or nothing, got {type(closure).__name__}: write "
            "loss.backward() and then optimizer.step()"
        )


def check_state_dict(state_dict: Any) -> None:
    """Raise TypeError or ValueError for anything but what `state_dict()` of an optimizer returns."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"need what optimizer.state_dict() returns, got {type(state_dict).__name__}: write torch.load(path) of a "
            "file, and state_dict() of an optimizer"
        )
    if not {"state", "param_groups"} <= set(state_dict):
        keys = ", ".join(map(str, list(state_dict)[:6]))
        raise ValueError(
            f"need what state_dict() of an optimizer returns, got the keys {keys}: "
            "if this is a whole checkpoint, give what it has of the optimizer"
        )


def with_known_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that refuses an unknown argument with the name that may be meant.

    It warns of a third argument without a name that looks like a momentum: others have theirs there.
    """
    known = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **arguments: Any) -> None:
        for name in arguments.keys() - set(known):
            meant = _ELSEWHERE.get(name) or " or ".join(get_close_matches(name, known))
            raise TypeError(f"{type(self).__name__} has no argument {name}" + (f": write {meant}" if meant else ""))
        if len(args) == 3 and "momentum" not in arguments and _looks_like_momentum(args[2]):
            warn_user(
                f"the third argument, {args[2]}, is weight_decay, as in torch.optim.Muon: write momentum={args[2]} or "
                f"weight_decay={args[2]}, whichever is meant"
            )
        init(self, *args, **arguments)

    return checked


def _looks_like_momentum(value: Any) -> bool:
    """Whether a number is one that momenta have and decays do not: those are less, or 1 and more at small rates."""
    return isinstance(value, Real) and 0.85 <= value < 1
