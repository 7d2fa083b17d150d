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
        if shared is None and peers:
            rates = " and ".join(str(float(rate.lr)) for rate in peers)
            notes.append(
                f"group {number}: its lr is no longer that of matrices, because the source's rates have no ratio, "
                f"{float(new['lr'])} here and {rates} for matrices. A scheduler that sets one lr for all groups would "
                "make them one rate"
            )
        elif shared is None and group["lr_factor"] != 1:
            notes.append(
                f"group {number}: lr_factor={group['lr_factor']} of this optimizer became 1, as lr is the source's rate"
            )
    return result, notes


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
    if ratio is None or (rate and not ratio):
        return None
    lr = rate / ratio if ratio else float(muon.lr)
    # If they stand at one place of one schedule, four roundings part them at most: then they share the value or tensor.
    settings = {"lr": muon.lr if math.isclose(lr, float(muon.lr), rel_tol=5 * 2**-53) else lr, "lr_factor": ratio}
    return {**settings, "initial_lr": muon.base} if "initial_lr" in new else settings
