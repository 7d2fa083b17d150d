"""Learning rates of AdamW's groups after an import: a ratio to the `lr` of matrices, or an `lr` of their own."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional, Sequence, Union

from torch import Tensor

from ..parameters.rates import ratio_of
from .state_sources import Settings

Number = Union[float, Tensor]


class Rate(NamedTuple):
    """The `lr` of a group, and its base: what a schedule began with, the `lr` itself where there is none."""

    lr: Number
    base: Number

    def equals(self, other: Rate) -> bool:
        """Whether both are the same numbers, or the same tensors."""
        return all(map(_is_same, self, other))


def imported_rates(groups: Sequence[Settings], changes: Sequence[Settings]) -> tuple[list[Settings], list[str]]:
    """Return `changes` with what makes each group of AdamW move by the source's rate, and notes.

    The source's `lr` is the full rate of its parameters. A group whose base was that of matrices still has theirs: the
    ratio of the source's bases becomes its `lr_factor`, so a scheduler that sets one `lr` for all groups keeps that
    ratio. Every other group that the source has a rate for, and one whose rates have no ratio, gets its rate as `lr`,
    with the factor 1.
    """
    result, notes = [], []
    for number, (group, new) in enumerate(zip(groups, changes)):
        if group["use_muon"] or "lr" not in new:
            result.append(new)
            continue
        peers = _rates_of_peers(group, groups, changes)
        shared = _beside(peers[0], new) if peers and all(map(peers[0].equals, peers)) else None
        result.append({**new, **(shared or {"lr_factor": 1.0})})
        notes += [f"group {number}: {text}" for text in _notes(group, result[-1], peers, shared is not None)]
    return result, notes


def _notes(group: Settings, new: Settings, peers: Sequence[Rate], is_shared: bool) -> list[str]:
    """Return a note on a group whose rate is not what one scheduler for all groups would make of it, if it is one."""
    rates = " and ".join(str(float(rate.lr)) for rate in peers)
    if is_shared and not _is_same(new["lr"], peers[0].lr):
        return [
            f"its lr is {new['lr']} beside {rates} of matrices, which stand at other places of their schedules. One "
            "schedule for all groups makes them equal"
        ]
    if not is_shared and peers:
        return [
            f"its lr, {float(new['lr'])}, is no longer that of matrices, {rates}, because the source's rates have no "
            "ratio. A scheduler that sets one lr for all groups would make them one rate"
        ]
    if not is_shared and group["lr_factor"] != 1:
        return [f"lr_factor={group['lr_factor']} of this optimizer became 1, as lr is the source's rate"]
    return []


def _rates_of_peers(group: Settings, groups: Sequence[Settings], changes: Sequence[Settings]) -> list[Rate]:
    """Return the new rates of the groups of matrices that had the base of `group`."""
    base = _rate(group).base
    pairs = ((each, new) for each, new in zip(groups, changes) if each["use_muon"])
    return [_rate(new if "lr" in new else each) for each, new in pairs if _is_same(_rate(each).base, base)]


def _rate(settings: Settings) -> Rate:
    return Rate(settings["lr"], settings.get("initial_lr", settings["lr"]))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)


def _beside(muon: Rate, new: Settings) -> Optional[Settings]:
    """Return the settings with which a group has the rates of `new` as a ratio to those of `muon`, None without one."""
    rate, base, base_of_muon = float(new["lr"]), float(_rate(new).base), float(muon.base)
    if rate == base == base_of_muon == 0:
        return {"lr": muon.lr}  # any ratio does, so the present one stays
    ratio = ratio_of(base, base_of_muon)
    if ratio is None:
        return None
    lr = rate / ratio if ratio else float(muon.lr)
    if not math.isclose(lr * ratio, rate, rel_tol=2**-50):  # so small or so large that floats do not reach it
        return None
    # If they stand at one place of one schedule, four roundings part them at most: then they share the value or tensor.
    settings = {"lr": muon.lr if math.isclose(lr, float(muon.lr), rel_tol=5 * 2**-53) else lr, "lr_factor": ratio}
    return {**settings, "initial_lr": muon.base} if "initial_lr" in new else settings
