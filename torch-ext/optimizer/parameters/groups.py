"""Parameter groups: how mixed ones are split by branch, and how groups are saved and loaded."""

from __future__ import annotations

import re
from typing import Any, Collection, Mapping, Optional, Sequence

from torch import Tensor

from ..kernels.provenance import build_info
from .argument_checks import params_as_list
from .checks import check_parameter, check_trainable
from .group_keys import check_keys
from .matrices import is_stack, moments_in_group, view_in_group
from .momentum_blocks import blocks_in_group
from .names import listed, named_parameters, names_of
from .rates import fallback_decay, fallback_rate, first_decay_lr
from .routing import IsMuon, decide, reason_of, unique_parameters
from .sequences import is_sequence
from .setting_values import flag
from .settings import DISSOLVED, Group, keeps_norm, plain_settings
from .state import STATE_FORMAT, check_loaded
from .synonyms import as_adamws, check_implementations, pop_branch_, pop_implementations_

# A saved group has this in place of a function, which the user must pass again.
FUNCTION = "function"

# What a saved group says about its writer: the format, which decides whether it loads, and the build, which never does.
_SAVED_BY = {"state_format": STATE_FORMAT, "build": str(build_info())}

# Settings that may be sequences of any length, and the key of saved groups that has their lengths, as text that ends in
# the number of names.
_SEQUENCES, LENGTHS = ("ns_coefficients", "expert_keys", "split_rows"), "sequence_lengths"
_NUMBER_OF_NAMES = re.compile(r"(?:, )?param_names (\d+)$")

# Keys that a group keeps when a saved group is loaded.
_KEPT = ("params", "param_names", "use_muon", "state_format", "build", "offload", "master_weights")


def split_group(
    group: Group, defaults: Group, is_muon: Optional[IsMuon], first: int
) -> tuple[list[dict[str, Any]], dict[Tensor, str]]:
    """Return `group` as one or two groups, each with one branch, and the reason for the branch of each parameter.

    `group` has `params` (tensors or `(name, tensor)` pairs) and settings; `defaults` has the settings that it lacks.
    `use_muon` overrides routing. Both groups keep its `lr`; AdamW's moves by `lr * lr_factor` (`rates`). Other
    optimizers' names of settings are accepted (`synonyms`). Unnamed parameters are called `param_<first>` and so on;
    tied parameters come once. Raises ValueError or TypeError for parameters or settings that cannot work.
    """
    check_has_params(group)
    changed = {key: value for key, value in group.items() if key not in ("params", "param_names", LENGTHS)}
    check_keys(changed)
    forced, implementations = pop_branch_(changed), pop_implementations_(changed)
    settings = plain_settings({**defaults, **changed})
    named, reasons = _by_branch(group, settings, forced, is_muon, first)
    branches = [branch for branch, members in named.items() if members] or [forced or "adamw"]
    check_implementations(implementations, "muon" if "muon" in branches else settings["fallback"])
    settings = plain_settings({**settings, **as_adamws(changed, defaults, both="muon" in branches)})
    settings.pop("betas", None)
    rates = {"muon": (settings["lr"], 1.0)}
    if "adamw" in branches:
        rates["adamw"] = fallback_rate(changed, settings, defaults["adamw_lr"])
    adamw_decay = fallback_decay(changed, settings, defaults["adamw_weight_decay"])
    decays = {"muon": settings["weight_decay"], "adamw": adamw_decay}
    if branches == ["muon"]:
        rates["muon"] = settings["lr"], settings["lr_factor"]  # the checks at the end refuse factors other than 1
    if len(branches) > 1 and settings["decay_lr"] is not None and len({float(lr) for lr, _ in rates.values()}) > 1:
        raise ValueError(
            f"decay_lr={settings['decay_lr']} applies to one lr, and this group has two, {settings['lr']} and adamw_lr="
            f"{rates['adamw'][0]}: put the parameters of {settings['fallback']} into a separate group"
        )
    groups = []
    for branch in branches:
        lr, factor = rates[branch]
        changes = {"use_muon": branch == "muon", "lr": lr, "lr_factor": factor, "params": list(named[branch].items())}
        changes.update(weight_decay=decays[branch], decay_lr=first_decay_lr(settings, lr), **dict.fromkeys(DISSOLVED))
        groups.append({**settings, **changes, "param_names": [], **_SAVED_BY})
    return groups, reasons


def _by_branch(
    group: Group, settings: Group, forced: Optional[str], is_muon: Optional[IsMuon], first: int
) -> tuple[dict[str, dict[str, Tensor]], dict[Tensor, str]]:
    """Return the parameters of `group` by branch and name, and the reason for the branch of each."""
    by_branch: dict[str, dict[str, Tensor]] = {"muon": {}, "adamw": {}}
    reasons = {}
    for names, p in unique_parameters(params_with_names(group), first):
        stack = is_stack(names[0], p.ndim, settings["expert_keys"], settings["stacked"])
        branch, reasons[p] = (forced, reason_of(group)) if forced else decide(names, p, is_muon, stack)
        check_trainable(names[0], p)
        check_parameter(names[0], p, branch == "muon", settings["master_weights"])
        if branch == "muon":
            for seen in (view_in_group, blocks_in_group, moments_in_group):
                seen(names[0], p, settings)  # raises if the settings do not fit
        if names[0] in by_branch["muon"] or names[0] in by_branch["adamw"]:
            raise ValueError(
                f"two parameters are called {names[0]}: files and settings identify them by their names. Tell those of "
                'two modules apart by module.named_parameters(prefix="...")'
            )
        by_branch[branch][names[0]] = p
    return by_branch, reasons


def saved_group(group: Group) -> dict[str, Any]:
    """Return a group as it is saved: files cannot hold functions."""
    adjustment = FUNCTION if callable(group["adjust_lr_fn"]) else group["adjust_lr_fn"]
    lengths = [_sequence_lengths(group), f"param_names {len(group['param_names'])}"]
    return {**group, "adjust_lr_fn": adjustment, LENGTHS: ", ".join(filter(None, lengths))}


def _sequence_lengths(group: Group) -> str:
    """Return the lengths of the settings that are sequences, as text.

    With full_state_dict torch puts the entries of a file over those of the optimizer, one by one. The end of a longer
    sequence here would stay.
    """
    return ", ".join(f"{key} {len(group[key])}" for key in _SEQUENCES if is_sequence(group.get(key)))


def names_in_file(saved: Group) -> list[str]:
    """Return the `param_names` that a file has for a group, without those that torch has left of this optimizer's.

    With full_state_dict it leaves the end of a longer list. Files of earlier builds do not say how many are theirs.
    """
    number = _NUMBER_OF_NAMES.search(str(saved.get(LENGTHS)))
    return list(saved.get("param_names", ()))[: int(number[1]) if number else None]


def other_meanings(group: Group) -> dict[str, str]:
    """Return what settings of `group` mean, for those that mean something else in every other optimizer."""
    meanings = {}
    if group["decay_mode"] == "independent":
        meanings["weight_decay"] = meanings["decay_mode"] = "a parameter loses that share of itself in each step"
    if keeps_norm(group):
        meanings["lr"] = meanings["initial_lr"] = "it is relative to the norm of a matrix"
    return meanings


def loaded_group(
    current: dict[str, Any], saved: dict[str, Any], state: Mapping[Tensor, Any], first: int
) -> dict[str, Any]:
    """Return the saved group with the names of the `current` one; settings that it lacks come from there too.

    `offload` stays as it is here, because it depends on the machine. `master_weights` stays too; `check_loaded` refuses
    remainders in a file if none are wanted. `expert_keys` stays if the file has none, and so do `other_meanings` if the
    file, which may be torch's, has no `decay_mode`. If a file has `lr` without `lr_factor`, as in format 1, the factor
    is 1. `DISSOLVED` arguments are dropped, since the group has them in other keys. `state` is the loaded state by
    parameter; the first parameter of this group has the position `first` in the file. Raises ValueError or TypeError if
    group or state do not fit, or if a parameter would be seen as other matrices than when it was saved.
    """
    check_format(saved)
    _check_same_branch(current, saved)
    saved = dict(saved)
    lengths = saved.pop(LENGTHS, None)
    lengths = lengths and _NUMBER_OF_NAMES.sub("", str(lengths))
    if lengths not in (None, _sequence_lengths(saved)):
        raise ValueError(
            f"the group of {listed(names_of(current))} was saved with sequences of the lengths {lengths}, and now "
            f"has {_sequence_lengths(saved)}: with full_state_dict torch mixes those of the file and of this "
            "optimizer. Construct it with those of the file, or load without full_state_dict. If you have changed a "
            f"sequence in the dict, remove {LENGTHS} from its group"
        )
    if "betas" in saved:
        raise ValueError(
            "the state is from another optimizer: its group has betas, which are called adamw_betas here. "
            "import_state(optimizer, state_dict, source=...) imports what fits"
        )
    if "decay_mode" not in saved:  # torch's
        saved = {key: value for key, value in saved.items() if key not in other_meanings(current)}
    kept = {**{key: current[key] for key in _KEPT}, **dict.fromkeys(DISSOLVED)}
    if not saved.get("expert_keys"):
        kept["expert_keys"] = current["expert_keys"]
    if "lr" in saved and "lr_factor" not in saved:
        kept["lr_factor"] = 1.0
    if saved.get("adjust_lr_fn") == FUNCTION:
        kept["adjust_lr_fn"] = current["adjust_lr_fn"]
        if not callable(kept["adjust_lr_fn"]):
            raise ValueError(
                f"adjust_lr_fn was a function when the state was saved, and is {kept['adjust_lr_fn']} here"
            )
    loaded = plain_settings({**current, **saved, **kept}, is_made=True)
    for position, (name, p) in enumerate(named_parameters(current), first):
        check_loaded(state.get(p, {}), name, p, loaded, position)
    if loaded["use_muon"] and "stacked" not in saved and "expert_keys" in saved:
        _check_same_stacks(loaded, saved["expert_keys"])
    return loaded


def check_format(saved: Group) -> None:
    """Raise ValueError if a saved group has a later format."""
    if saved.get("state_format", STATE_FORMAT) not in range(1, STATE_FORMAT + 1):
        raise ValueError(
            f"the state was saved in format {saved['state_format']}, this version knows 1 to {STATE_FORMAT}: load it "
            "with the version of this package that saved it, or a later one"
        )


def _check_same_branch(current: Group, saved: Group) -> None:
    flag("use_muon of a saved group", saved.get("use_muon", True))
    if saved.get("use_muon", current["use_muon"]) != current["use_muon"]:
        names = {True: "Muon", False: "AdamW"}
        raise ValueError(
            f"a group of {len(saved['params'])} parameters, {listed(names_of(current))}, was saved for "
            f"{names[saved['use_muon']]} and belongs to {names[current['use_muon']]} here: the parameters, their order "
            "or their routing differ; set use_muon in their group to what was saved"
        )


def _check_same_stacks(loaded: Group, expert_keys: Sequence[str]) -> None:
    """Raise ValueError if a parameter is seen as other matrices than by the rule of files without `stacked`.

    By that rule, more than two dimensions are a stack if one of `expert_keys` is in the name, else one matrix.
    """
    for name, p in named_parameters(loaded):
        was_stack = p.ndim > 2 and any(f".{key}." in f".{name}." for key in expert_keys)
        here, saved = (view_in_group(name, p, {**loaded, **stack}) for stack in ({}, {"stacked": was_stack}))
        if here != saved:
            raise ValueError(
                f"{name} {tuple(p.shape)} was saved as {saved}, and is {here} here: write stacked={was_stack} in its "
                "group to continue as before"
            )


def check_has_params(group: Group) -> None:
    """Raise TypeError for a group without `params`."""
    if "params" not in group:
        raise TypeError(f"a parameter group needs params, got the keys {', '.join(map(str, group))}")


def params_with_names(group: Group, key: str = "param_names") -> list:
    """Return the `params` of a group as a list, paired with the names under `key` if it has them.

    Raises TypeError for anything but names, and ValueError for another number of names than of parameters.
    """
    check_has_params(group)
    params = [group["params"]] if isinstance(group["params"], Tensor) else params_as_list(group["params"])
    if key not in group:
        return params
    names = group[key]
    if isinstance(names, (str, bytes)) or not isinstance(names, Collection):
        raise TypeError(f"{key} must be a list of names, got {names!r}")
    if len(names) != len(params):
        raise ValueError(f"{len(names)} {key} were given for {len(params)} params")
    return list(zip(names, params))
