"""Translation of other optimizers' group keys into this package's settings; keys without meaning here are refused."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from ..rules.fallback_table import FALLBACKS

# torch's choices between implementations of a step, and the branches that are implemented so. Products here always add
# to a matrix in the same call, which is what `use_addmm` asks for.
_BRANCHES_WITH = {"use_addmm": ("muon", *FALLBACKS), "foreach": (), "fused": tuple(FALLBACKS)}


def pop_branch_(settings: dict[str, Any]) -> Optional[str]:
    """Remove `use_muon`, its opposite `use_fallback`, and `algorithm` from `settings`; return the branch they ask for.

    If dion's key `algorithm` names a fallback, that becomes the setting `fallback`. Raises ValueError or TypeError for
    other values and for contradictions.
    """
    use_muon, use_fallback = (_flag_or_none(key, settings.pop(key, None)) for key in ("use_muon", "use_fallback"))
    algorithm = settings.pop("algorithm", None)
    if algorithm not in (None, "muon", *FALLBACKS):
        raise ValueError(f"algorithm must be one of muon, {', '.join(FALLBACKS)}, got {algorithm!r}")
    if algorithm in FALLBACKS:
        settings["fallback"] = algorithm
    asked = (use_muon, use_muon), (use_fallback, not use_fallback), (algorithm, algorithm == "muon")
    branches = {"muon" if is_muon else "adamw" for value, is_muon in asked if value is not None}
    if len(branches) > 1:
        options = {"use_muon": use_muon, "use_fallback": use_fallback, "algorithm": algorithm}
        shown = " and ".join(f"{key}={value!r}" for key, value in options.items() if value is not None)
        raise ValueError(f"{shown} contradict each other")
    return next(iter(branches), None)


def _flag_or_none(key: str, value: Any) -> Optional[bool]:
    if not isinstance(value, (bool, type(None))):  # a tensor of several elements cannot be compared with True
        raise TypeError(f"{key} must be True, False or None, got {value!r}")
    return value


def wish_of(p: Tensor) -> Optional[bool]:
    """Return the attribute `use_muon` of a parameter, None if it has none; TypeError for another value."""
    return _flag_or_none("use_muon of a parameter", getattr(p, "use_muon", None))


def pop_implementations_(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove `use_addmm`, `foreach` and `fused` from `settings` and return them."""
    return {key: settings.pop(key) for key in _BRANCHES_WITH if key in settings}


def check_implementations(flags: dict[str, Any], branch: str) -> None:
    """Raise ValueError for an implementation that `branch` lacks: a fallback, or `muon`, also for mixed groups.

    Raises TypeError for what is no flag.
    """
    for key, asked in flags.items():
        if _flag_or_none(key, asked) and branch not in _BRANCHES_WITH[key]:
            elsewhere = [f", or set it in a group that only {name} updates" for name in _BRANCHES_WITH[key][:1]]
            raise ValueError(
                f"{key}={asked!r} has no effect here: Muon's passes and AdamW's kernel are always fused, and matrices "
                f"always batched. Leave it out{''.join(elsewhere)}"
            )


def as_adamws(changed: dict[str, Any], defaults: dict[str, Any], both: bool) -> dict[str, Any]:
    """Return the settings that torch.optim.AdamW's `betas` and `eps` mean in a group that only the fallback updates.

    With `both`, if Muon updates some of its parameters, `eps` is Muon's, and `betas` raise ValueError.
    """
    if both:
        if "betas" in changed:
            raise ValueError(
                "betas are AdamW's, and Muon has parameters of this group too: write adamw_betas, which apply to the "
                "parameters that AdamW updates, or put these into a separate group"
            )
        return {}
    meant = {f"adamw_{key}": changed[key] for key in ("betas", "eps") if key in changed}
    return {"eps": defaults["eps"], **{key: value for key, value in meant.items() if key not in changed}}
