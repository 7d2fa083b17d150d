"""Which optimizer saved a state, as far as its keys tell, and what to do with it."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

# The source of files that this package saved.
THIS_PACKAGE = "this package"
# Keys of groups and state by which a source of `import_state` is recognised, all those of one of its sets; the first
# match counts. Moonlight's files have signs of Motif's, this package's and Keller Jordan's, too. The groups of torch's
# AdamW and Adam have any key that their user adds, but only these two write `amsgrad`.
_SIGNS: Sequence[tuple[str, tuple[set[str], ...]]] = (
    ("moonlight", ({"wd", "adamw_betas"},)),
    ("motif", ({"none_grad"}, {"moment1"})),
    (THIS_PACKAGE, ({"state_format"}, {"adamw_eps"})),
    ("adamw", ({"amsgrad"},)),
    ("dion_normuon", ({"muon_beta2"}, {"variance_neuron"})),
    ("dion", ({"mu"}, {"epsilon"})),
    ("timm", ({"fallback_lr_scale"}, {"safety_factor"})),
    ("keller_jordan", ({"use_muon"},)),
    ("torch", ({"ns_coefficients"},)),
    ("adamw", ({"exp_avg_sq"},)),
)


def source_of(state_dict: Mapping[str, Any]) -> Optional[str]:
    """Return what a state dict looks like: a source of `import_state`, `THIS_PACKAGE`, or None if it is unknown."""
    groups, states = state_dict["param_groups"], state_dict["state"].values()
    keys = {key for each in (*groups, *states) if isinstance(each, Mapping) for key in each}
    return next((source for source, signs in _SIGNS if any(sign <= keys for sign in signs)), None)


def advice_for(source: Optional[str]) -> str:
    """Return a text that says what to do with a state dict that looks like `source`."""
    if source == THIS_PACKAGE:
        return "this package saved it: optimizer.load_state_dict(state_dict) loads it"
    if source is None:
        known = dict.fromkeys(name for name, _ in _SIGNS if name != THIS_PACKAGE)
        return (
            "which one is unknown, so it cannot be imported. If you know that it is one of "
            f"{', '.join(known)}, call import_state(optimizer, state_dict, source=...); else start with a new state"
        )
    return f"it looks like {source!r}: import_state(optimizer, state_dict, source={source!r}) imports what fits"
