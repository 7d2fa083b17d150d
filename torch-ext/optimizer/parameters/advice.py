"""Questions for users to decide, one line each, with what to write: warnings, and notes in `explain()`."""

from __future__ import annotations

import math
import re
from collections import Counter
from operator import attrgetter, itemgetter
from typing import Any, Collection, Iterable, Mapping, NamedTuple, Sequence

from torch import Tensor

from ..iteration import DTYPES
from .matrices import EXPERT_KEYS, is_stack
from .names import MADE_UP, bare_name, listed, named_parameters, names_of, repeated
from .rates import rate_of
from .roles import ROLES
from .routing import UNDECIDED, Route, reason_of
from .sequences import grouped
from .settings import Group
from .synonyms import pop_branch_

# Findings about LoRA.
_LORA = (
    "Muon updates {} LoRA factors (A and B, of rank 4 or more). LoRA trained this way matches or beats AdamW on models "
    "that were pretrained with Adam (arXiv:2605.10468). OneTrainer (pull request 1314) saw noise in A and leaves it "
    "to AdamW; for that put lora_A into a group with use_muon=False. A and B are orthogonalized separately, not as the "
    "product B A (arXiv:2606.12921)"
)
# A warning is given if Muon has less than this share of the elements of hidden matrices.
LEAST_SHARE = 0.5
# Reasons of matrices that are not hidden ones.
_OUTER = ("embedding", "output_head")
# Reasons by which routing, once it has decided, gives a matrix to the fallback. A user may give any other, and it ends
# the advice.
_BY_ROUTING = (*ROLES, "leading_unit_dims", "min_dim_too_small", "extreme_aspect_ratio")
_STACK_OR_CONVOLUTION = (
    "stacks of matrices, or convolutions? Names do not show it, so the fallback has them. For stacks (experts, rows, "
    "cols) write expert_keys=(...) with a component of their names, or stacked=True in their group; for convolutions "
    "stacked=False; use_muon=False leaves them where they are"
)
# Names in nn.Sequential.
_NUMBERED = re.compile(r"(\d+\.)+\w+")


class Uncut(NamedTuple):
    """A remark of `groups_for` on a weight that it did not cut, or whose rows it could not tell from its columns."""

    name: str
    role: str
    remark: str
    left_open: Mapping[str, Any]  # the settings that the remark asks for, as the group has them


def routed(groups: Sequence[Group], reasons: Mapping[Tensor, str]) -> list[Route]:
    """Return the routes of all parameters of `groups`; parameters that a wrapper appended count as decided."""
    return [
        Route(
            name, tuple(p.shape), "muon" if group["use_muon"] else group["fallback"], reasons.get(p, reason_of(group))
        )
        for group in groups
        for name, p in named_parameters(group)
    ]


def told_names(groups: Sequence[Group]) -> set[str]:
    """Return the names of parameters whose group gives a reason for its branch, as `groups_for` does."""
    return {name for group in groups if "reason" in group for name in names_of(group)}


def advice(routes: Iterable[Route], told: Collection[str] = (), others: Sequence[Route] = ()) -> list[str]:
    """Return a line for each question that a user should decide about these parameters; empty if there is none.

    `told` are the names of parameters whose modules were asked: they need no names that say something, and embeddings
    and heads among them are no surprise. `others` are routes of the same optimizer about which a user has decided. They
    count in what Muon has of the whole.
    """
    routes = list(routes)
    everything = [*others, *routes]
    undecided = [route for route in routes if route.reason == UNDECIDED]
    muon = sum(route.elements for route in everything if route.branch == "muon")
    matrices = [route for route in everything if route.branch != "muon" and sum(size > 1 for size in route.shape) > 1]
    left = [route for route in matrices if _kind(route) in _BY_ROUTING]
    hidden = [route for route in left if _kind(route) not in _OUTER]
    lines = [f"{_described(undecided)}: {_STACK_OR_CONVOLUTION}"] if undecided else []
    unnamed = [route for route in _with_empty_names(routes) if route.name not in told]
    if unnamed:
        lines.append(_nameless(unnamed))
    share = muon / (muon + sum(route.elements for route in hidden)) if muon else 0.0
    if set(left).isdisjoint(routes):
        return lines
    if muon and share < LEAST_SHARE:
        lines.append(_little(f"{share:.1%} of the elements of hidden matrices", hidden))
    elif not muon and (hidden or any(route.name not in told for route in left)):
        lines.append(_little("no matrix", left))
    return lines


def idle_keys(groups: Sequence[Group], known: Sequence[str] = ()) -> list[str]:
    """Return a line if some `expert_keys` of `groups` match no name, except the default and those in `known`."""
    names = [name for group in groups for name in names_of(group)]
    keys = dict.fromkeys(key for group in groups for key in group["expert_keys"])
    idle = [key for key in keys if key not in (*EXPERT_KEYS, *known) and not any(is_stack(n, 3, (key,)) for n in names)]
    if not idle:
        return []
    example = f", such as {max(names, key=len)}" if names else ""
    return [
        f"expert_keys {idle} are in no parameter's name{example}: a key is a whole component of a name, between dots "
        "and without wildcards, and its parameters are stacks (experts, rows, cols). Correct them, or leave them out"
    ]


def idle_is_muon(params: Sequence[Any]) -> list[str]:
    """Return a line if all of `params` are groups that say their branch, so that nobody asks `is_muon`."""
    if not all(isinstance(group, dict) and pop_branch_(dict(group)) for group in params):
        return []
    return [
        "is_muon is not asked about these groups, because each says its branch, as those of groups_for do by use_muon: "
        "write groups_for(model, patterns={...}), or leave use_muon out of the groups"
    ]


def idle_adamw_arguments(groups: Sequence[Group], defaults: Group) -> list[str]:
    """Return a line for each argument for AdamW among `defaults` that no group of AdamW has taken.

    Tensors are left out, because reading one may wait for its device.
    """
    numbers = {
        "adamw_lr": ("lr, lr_factor or adamw_lr", rate_of),
        "adamw_weight_decay": ("weight_decay or adamw_weight_decay", itemgetter("weight_decay")),
    }
    lines = []
    for key, (stronger, number_of) in numbers.items():
        value, here = defaults[key], [number_of(group) for group in groups if not group["use_muon"]]
        if value is None or not here or any(isinstance(number, Tensor) for number in (value, *here)):
            continue
        if not any(math.isclose(value, number, rel_tol=1e-9) for number in here):
            lines.append(
                f"{key}={value} has no effect, because every group of AdamW's parameters has its own {stronger}: leave "
                f"these out, or {key}"
            )
    return lines


def same_names(groups: Sequence[Group], added: Sequence[Group]) -> list[str]:
    """Return a line if a parameter of the `added` ones among `groups` has the name of another; made-up ones may."""
    added_names = {name for group in added for name in names_of(group)}
    twice = repeated(name for group in groups for name in names_of(group))
    twice = [name for name in twice if name in added_names and not MADE_UP.fullmatch(name)]
    if not twice:
        return []
    return [
        f"parameters of different groups have the same name: {listed(twice)}. Files identify parameters by names, so "
        "a load could not tell that groups come in another order, and would give the state of one parameter to the "
        'other. Tell the parameters of two modules apart by module.named_parameters(prefix="...")'
    ]


def remarks(routes: Iterable[Route]) -> list[str]:
    """Return a line for each choice on which published results disagree; for information only."""
    factors = [route for route in routes if route.branch == "muon" and _kind(route) == "lora"]
    return [_LORA.format(len(factors))] if factors else []


def uncut_lines(uncut: Iterable[Uncut]) -> list[str]:
    """Return a line for each role and remark, with the first of the weights."""
    alike = grouped(uncut, attrgetter("role", "remark"))
    what = ["rows" if each[0].role == "matrix" else each[0].role for each in alike]
    return [f"{w} of {listed([one.name for one in each], 1)} {each[0].remark}" for w, each in zip(what, alike)]


def still_uncut(uncut: Iterable[Uncut], groups: Sequence[Group]) -> list[Uncut]:
    """Return those of which a setting is still as it was: a user or a loaded state may have changed it."""
    now = {name: group for group in groups if group["use_muon"] for name in names_of(group)}
    known = [each for each in uncut if each.name in now]
    return [each for each in known if any(now[each.name][key] == value for key, value in each.left_open.items())]


def frozen_line(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return a line if a model has frozen parameters; tied ones count once."""
    frozen = [name for p, name in _first_names(named).items() if not p.requires_grad]
    if not frozen:
        return []
    return [
        f"frozen parameters are left out ({len(frozen)}, the first is {frozen[0]}): to train some of them later, "
        "call groups_for before you freeze them. While frozen they cost no state"
    ]


def refused_line(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return a line if a model trains parameters of dtypes that Muon refuses, which nobody trains then."""
    names = _first_names(named)
    refused = [f"{name} ({p.dtype})" for p, name in names.items() if p.requires_grad and p.dtype not in DTYPES]
    if not refused:
        return []
    return [f"left out: {listed(refused)}. Give them to a torch.optim.AdamW beside this optimizer"]


def _first_names(named: Iterable[tuple[str, Tensor]]) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {}
    for name, p in named:
        names.setdefault(p, name)
    return names


def _little(what: str, left: Sequence[Route]) -> str:
    reasons = Counter(map(_kind, left)).most_common()
    return (
        f"Muon has {what}: the fallback updates {_described(left)}, because of "
        f"{', '.join(f'{kind} ({count})' for kind, count in reasons)}. For matrices that Muon should update write "
        "use_muon=True in their group, or pass is_muon. use_muon=False for the others silences this warning. With "
        "groups_for, write these keys in its patterns"
    )


def _with_empty_names(routes: Sequence[Route]) -> list[Route]:
    """Return the matrices whose names do not show whether they are embeddings or heads.

    A name is empty if it is a number, or `weight` alone beside the names of other layers.
    """
    names = [bare_name(route.name) for route in routes]
    has_layers = any("." in name for name in names) or names.count("weight") > 1
    has_outer = any(_kind(route) in _OUTER for route in routes)

    def is_empty(name: str) -> bool:
        is_alone = name == "weight" and has_layers
        return is_alone or bool(MADE_UP.fullmatch(name)) or (bool(_NUMBERED.fullmatch(name)) and not has_outer)

    return [route for route, name in zip(routes, names) if route.reason == "matrix" and is_empty(name)]


def _nameless(routes: Sequence[Route]) -> str:
    return (
        f"{_described(routes)}: matrices without names, or with names that say nothing (a number as in nn.Sequential, "
        "'weight' alone as in head.named_parameters()). Muon updates them all, even embeddings and output heads, which "
        "AdamW should update. Write Muon(groups_for(model)), which asks the modules, Muon(model.named_parameters()) "
        'where modules have names, or head.named_parameters(prefix="head"). use_muon=True or False in a group silences '
        "this warning"
    )


def _kind(route: Route) -> str:
    return route.reason.split(":")[0]


def _described(routes: Sequence[Route]) -> str:
    """Return a text with the number of parameters and elements, and the largest parameter."""
    largest = max(routes, key=attrgetter("elements"))
    example = f"{largest.name} {largest.shape}"
    if len(routes) == 1:
        return example
    return f"{len(routes)} parameters ({sum(route.elements for route in routes):,} elements), such as {example}"
