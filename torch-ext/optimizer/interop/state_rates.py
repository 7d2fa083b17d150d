"""Learning rates of AdamW's groups after an import: their own, or a ratio to Muon's `lr`."""

from __future__ import annotations

import math
from typing import Any, Collection, Optional, Sequence

from torch import Tensor

from ..parameters.rates import ratio_of
from .state_sources import Settings


def imported_rates(
    groups: Sequence[Settings], changes: Sequence[Settings], cut_off: Collection[int]
) -> tuple[list[Settings], list[str]]:
    """Return `changes` with the `lr_factor` of each group that gets an `lr` from the source, and notes.

    The source's `lr` is the full rate of its parameters. A group of the fallback that has had its rate as a ratio to
    Muon's `lr` gets Muon's new `lr` and the ratio: one that routing `cut_off` from its matrices, or one with an
    `lr_factor`. So a scheduler that sets one `lr` for all groups keeps the source's ratio. Every other group gets its
    rate as `lr`, with the factor 1.
    """
    result, notes = [], []
    for number, (group, new) in enumerate(zip(groups, changes)):
        had_ratio = not group["use_muon"] and (number in cut_off or group["lr_factor"] != 1)
        muon = _muon_of(group, groups, changes) if had_ratio else None
        rates = {} if "lr" not in new else {"lr_factor": 1.0} if muon is None else _rates_beside(muon, new)
        result.append({**new, **rates})
        if rates and had_ratio and rates["lr_factor"] == 1 != group["lr_factor"] and "lr" not in rates:
            notes.append(
                f"group {number}: lr_factor={group['lr_factor']} of this optimizer became 1, as lr is the source's rate"
            )
    return result, notes


def _muon_of(group: Settings, groups: Sequence[Settings], changes: Sequence[Settings]) -> Optional[Settings]:
    """Return the new settings of the groups of matrices that have had the `lr` of `group`; None if they differ now."""
    sharing = [
        {**each, **new} for each, new in zip(groups, changes) if each["use_muon"] and _is_same(each["lr"], group["lr"])
    ]
    return sharing[0] if sharing and all(_is_same(each["lr"], sharing[0]["lr"]) for each in sharing) else None


def _is_same(lr: Any, other: Any) -> bool:
    return lr is other or (not (isinstance(lr, Tensor) or isinstance(other, Tensor)) and lr == other)


def _rates_beside(muon: Settings, new: Settings) -> Settings:
    """Return `lr`, `lr_factor` and `initial_lr` that keep the rates of `new` beside `muon`; the factor 1 if none do."""
    # At the end of a schedule both may stand still; then only the rates with which it began have a ratio.
    key = "lr" if muon["lr"] or new["lr"] else "initial_lr"
    ratio = None if isinstance(muon["lr"], Tensor) else ratio_of(new.get(key, 0.0), muon.get(key, 0.0))
    base = new.get("initial_lr")
    if ratio is None or isinstance(base, Tensor) or (base and not ratio):  # a base that no factor of 0 gives
        return {"lr_factor": 1.0}
    rates = {"lr": muon["lr"], "lr_factor": ratio}
    if base is not None:
        rates["initial_lr"] = base / ratio if ratio else muon.get("initial_lr", muon["lr"])
        if math.isclose(rates["initial_lr"], muon.get("initial_lr", math.inf), rel_tol=1e-12):
            rates["initial_lr"] = muon["initial_lr"]  # rounding alone would make a scheduler set two values
    return rates
