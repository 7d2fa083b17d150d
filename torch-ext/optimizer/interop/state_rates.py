"""Learning rates of AdamW's groups after an import: a ratio to the `lr` of matrices, or an `lr` of their own."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional, Sequence

from torch import Tensor

from ..parameters.rates import ratio_of
from ..parameters.setting_values import number_in
from ..parameters.settings import keeps_norm
from ..rules.decay import Number
from .state_sources import Settings


class Rate(NamedTuple):
    """The `lr` of a group, and its base: its `initial_lr`, or `lr` without one."""

    lr: Number
    base: Number

    @property
    def numbers(self) -> tuple[float, float]:
        """Both as floats; the host waits if they are on a device."""
        return _float(self.lr), _float(self.base)


def imported_rates(groups: Sequence[Settings], changes: Sequence[Settings]) -> tuple[list[Settings], list[str]]:
    """Return `changes` with what makes each group of AdamW move by the source's rate, and notes.

    The source's `lr` is the full rate of its parameters. A group that had the base of matrices gets their new one: the
    ratio of the source's bases becomes its `lr_factor`, so a scheduler that sets one `lr` for all groups keeps that
    ratio. Every other group that the source has a rate for, and one whose rates have no ratio, gets its rate as `lr`,
    with the factor 1. An `initial_lr` here becomes the new `lr` if the source has none.
    """
    changes = [
        {"initial_lr": new["lr"], **new} if "lr" in new and "initial_lr" in group else new
        for group, new in zip(groups, changes)
    ]
    result, notes = [], []
    for number, (group, new) in enumerate(zip(groups, changes)):
        if group["use_muon"] or "lr" not in new:
            result.append(new)
            continue
        peers = _rates_of_peers(group, groups, changes)
        shared = _beside(peers[0], new) if len({rate.numbers for rate in peers}) == 1 else None
        result.append({**new, **(shared or {"lr_factor": 1.0})})
        is_shared = shared is not None
        notes += [f"group {number}: {text}" for text in _notes(group, {**group, **result[-1]}, peers, is_shared)]
    return result, notes


def _notes(group: Settings, new: Settings, peers: Sequence[Rate], is_shared: bool) -> list[str]:
    """Return a note if one scheduler for all groups would change the source's ratio, or if a factor was replaced."""
    lr, rates = _float(new["lr"]), dict.fromkeys(_float(rate.lr) for rate in peers)
    matrices = " and ".join(map(str, rates))
    if is_shared and lr not in rates:
        return [
            f"its rate is {lr * new['lr_factor']}, lr={lr} times lr_factor={new['lr_factor']}, beside lr={matrices} of "
            "matrices: they stand at different places of a schedule. A scheduler that sets one lr for all ends that"
        ]
    if not is_shared and peers:
        return [
            f"its lr, {lr}, is no longer that of matrices, {matrices}, because no lr_factor fits. A scheduler that "
            "sets one lr for all groups would give all of them that rate"
        ]
    if not is_shared and group["lr_factor"] != 1:
        return [f"lr_factor={group['lr_factor']} of this optimizer became 1, as lr is the source's rate"]
    return []


def _rates_of_peers(group: Settings, groups: Sequence[Settings], changes: Sequence[Settings]) -> list[Rate]:
    """Return the new rates of the groups of matrices that had the base of `group`.

    A group that keeps norms has an `lr` in another unit, so it counts only where there are no others.
    """
    base = _float(_rate(group).base)
    pairs = [(each, new) for each, new in zip(groups, changes) if each["use_muon"] and _float(_rate(each).base) == base]
    ordinary = [(each, new) for each, new in pairs if not keeps_norm(each)]
    return [_rate(new if "lr" in new else each) for each, new in ordinary or pairs]


def _rate(settings: Settings) -> Rate:
    return Rate(settings["lr"], settings.get("initial_lr", settings["lr"]))


def _float(number: Any) -> float:
    return float(number_in(number) if isinstance(number, Tensor) else number)


def _beside(muon: Rate, new: Settings) -> Optional[Settings]:
    """Return the settings with which a group has the rates of `new` as a ratio to those of `muon`, None without one."""
    (lr_of_muon, base_of_muon), (rate, base) = muon.numbers, _rate(new).numbers
    if lr_of_muon == base_of_muon == rate == base == 0:
        return {"lr": muon.lr}  # any ratio does, so the present one stays
    ratio = ratio_of(base, base_of_muon)
    if ratio is None:
        return None
    lr = rate / ratio if ratio else lr_of_muon
    if not math.isclose(lr * ratio, rate, rel_tol=2**-50):  # so small or so large that floats do not reach it
        return None
    # At one place of one schedule only rounding parts them, by a hundred operations at most: then they share the value.
    settings = {"lr": muon.lr if math.isclose(lr, lr_of_muon, rel_tol=100 * 2**-53) else lr, "lr_factor": ratio}
    return {**settings, "initial_lr": muon.base} if "initial_lr" in new else settings
