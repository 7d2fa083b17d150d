"""Step multipliers: how the learning rate of a matrix is scaled for its shape.

The polar factor of a rows x cols matrix has spectral norm 1 and a root mean square of 1 / sqrt(max(rows, cols)).
"""

from __future__ import annotations

import math
from typing import Callable, Union

# A name in MULTIPLIERS, a function of rows and columns, or None, which means `original` as in torch.optim.Muon.
Adjustment = Union[str, Callable[[int, int], float], None]

# The root mean square of an AdamW update. `match_rms_adamw` scales a matrix's update to the same value.
UPDATE_RMS = 0.2


def _root_of_ratio(rows: int, cols: int) -> float:
    return math.sqrt(rows / cols)


MULTIPLIERS = {
    # Each step has spectral norm max(1, rows / cols)**0.5; Jordan (2024), https://kellerjordan.github.io/posts/muon/
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    # Each step has root mean square 1, times `update_rms`; Liu et al., Muon is Scalable, arXiv:2502.16982, section 2.2
    "match_rms_adamw": lambda rows, cols: math.sqrt(max(rows, cols)),
    # Operator norm 1 between root-mean-square norms; Bernstein (2025), https://jeremybernste.in/writing/deriving-muon
    "rms_to_rms": _root_of_ratio,
    # The same, as torch.optim.Muon calls it from torch 2.14 on
    "spectral_unclamped": _root_of_ratio,
}


def check_adjustment(adjust_lr_fn: Adjustment) -> Callable[[int, int], float]:
    """Return the function of rows and columns that `adjust_lr_fn` is or names. ValueError for an unknown name."""
    if callable(adjust_lr_fn):
        return adjust_lr_fn
    name = "original" if adjust_lr_fn is None else adjust_lr_fn
    if not isinstance(name, str) or name not in MULTIPLIERS:
        raise ValueError(
            f"adjust_lr_fn {adjust_lr_fn!r} is none of {', '.join(MULTIPLIERS)}, and not a function of rows and columns"
        )
    return MULTIPLIERS[name]


def check_update_rms(update_rms: float, adjust_lr_fn: Adjustment) -> None:
    """Raise ValueError for another `update_rms` than the default beside an adjustment that does not use it."""
    if update_rms != UPDATE_RMS and adjust_lr_fn != "match_rms_adamw":
        raise ValueError(
            f"update_rms={update_rms} needs adjust_lr_fn='match_rms_adamw', but adjust_lr_fn is {adjust_lr_fn!r}: "
            f"write update_rms={UPDATE_RMS}, the default, in groups with another one"
        )


def step_multiplier(adjust_lr_fn: Adjustment, rows: int, cols: int, update_rms: float = UPDATE_RMS) -> float:
    """Return the factor of `lr` for a rows x cols matrix. `update_rms` matters for `match_rms_adamw` only.

    Raises ValueError for an unknown adjustment, and if a user's function does not return a finite number above 0.
    """
    result = check_adjustment(adjust_lr_fn)(rows, cols)
    try:
        multiplier = float(result)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        multiplier = math.nan
    if adjust_lr_fn == "match_rms_adamw":
        multiplier *= update_rms
    if not 0 < multiplier < math.inf:
        raise ValueError(
            f"the multiplier of lr must be a finite number above 0, got {result!r} for "
            f"{rows} x {cols} from adjust_lr_fn={adjust_lr_fn!r} and update_rms={update_rms}"
        )
    return multiplier
