"""Import of another optimizer's state: parameters are matched, momentum is rescaled, settings are translated.

A state that this package saved in other groups needs no translation: `regrouping` has it.
"""

from __future__ import annotations

from reprlib import repr as shortened
from typing import Any, Iterable, Mapping, Optional, Sequence

from torch import Tensor

from ..muon import Muon
from ..parameters.argument_checks import check_state_dict
from ..parameters.file_sources import THIS_PACKAGE, advice_for, source_of
from ..parameters.names import listed
from ..parameters.state import REMAINDER
from .regrouping import regroup_
from .source_checks import check_needed, check_settings
from .state_matching import Entry, entries_of, hints_on_order, matched, parameters_of, refusal
from .state_order import given_groups, given_parameters, names_in_order, orders_that_may_differ, shapes_by_group
from .state_settings import merged_groups
from .state_sources import OTHER_GROUPS, SOURCES, Source, translated_state

# Sources whose files are recognised with certainty, by keys that they always have, even before the first step.
_SURE = ("torch", "adamw")
# Sources of which some classes update matrices alone, so that another optimizer has the rest.
_BESIDE_ADAMW = ("torch", "keller_jordan")
_ORDER_OF_NAMES = "names must be in the order of the source: the parameters of its first group, then those of the next"


def import_state(
    optimizer: Muon,
    state_dict: Mapping[str, Any],
    source: str = "torch",
    *,
    adamw_state_dict: Optional[Mapping[str, Any]] = None,
    names: Optional[Iterable[str]] = None,
) -> list[str]:
    """Load another optimizer's `state_dict` into `optimizer` in place; return sentences about what was not imported.

    The state of the parameters and the settings of their groups are replaced, learning rates included. A group of AdamW
    that shares the `initial_lr` of matrices (without one, their `lr`) goes on sharing theirs; its `lr_factor` becomes
    the source's rate of AdamW divided by that of the matrices. Other groups, and those for which no factor fits, get
    the source's rate as their `lr`, with an `lr_factor` of 1. Tensors are copied; momentum keeps its dtype, unless this
    optimizer has a `momentum_dtype`, and AdamW's averages get the dtype that they have here. Where parameters are
    sharded and the source has whole tensors, each rank takes its parts; nothing is sent. Lower halves of
    `master_weights` stay as they are.

    Args:
        source: `torch` (torch.optim.Muon), `timm` (with its AdamW or NAdamW), `keller_jordan` (any class of muon.py),
            `motif`, `moonlight` (toy_train.py), `dion` (its Muon), `dion_normuon` (its NorMuon), `adamw`
            (torch.optim.AdamW or Adam alone), or `other_groups` (this package).
        adamw_state_dict: the state dict of the torch.optim.AdamW used next to a torch.optim.Muon, or next to a Muon or
            SingleDeviceMuon of muon.py. Without it state and groups of AdamW's parameters stay as they are, and a
            sentence says so.
        names: names of the source's parameters in its order, those of `adamw_state_dict` last. Without `names`, the
            names in its groups count, and otherwise the order: its k-th matrix is this optimizer's k-th matrix, and the
            same for the other parameters. For `adamw`, each group of the source must have its parameters in the order
            in which they were passed to this optimizer, such as model.parameters(); shapes decide between groups.
            Give `names` if parameters of one shape are in more groups here than in the source, as with `groups_for`,
            which does not keep the model's order; or in fewer, as where an embedding and a head had a group each. For
            `adamw` fewer groups are enough if shapes tell the parameters apart.

    From `other_groups`, parameters get their whole state by name, whatever their groups and their order were. Groups
    and their settings stay as they are here, learning rates included. A parameter of another branch than in the source,
    as where a newer `groups_for` sorts it otherwise, keeps the state that it has here, and a sentence names it. Lower
    halves come along.

    From `adamw`, the fallback's parameters get their whole state, and their group gets the settings. Matrices get
    `exp_avg` as momentum, unchanged: with momentum = beta1, Muon would have computed the same average. Its missing bias
    correction does not matter, because the update of a matrix does not depend on the scale of momentum. (Correcting it
    would only give the past more weight against the next gradients, by less than 1 % from step 44 on at beta1 = 0.9.)
    From then on Muon's own momentum applies, and the settings of matrices stay as they are.

    `motif`, `moonlight` and dion keep sums of gradients; these become averages, multiplied by 1 - momentum of the saved
    group. Only settings that mean the same here are imported: no `lr` into a group with `experimental_hyperball`, no
    `weight_decay` into one with independent decay. Constants of the source's code are imported, too. An eps that the
    source adds to the norm becomes the norm's lower bound. `adamw_eps` of `moonlight` is imported as it is, though it
    counts 1 / sqrt(1 - beta2^step) times as much there, which tends to 1. The returned sentences name the other
    settings: those unknown here, those that the state lacks, and those that differ between groups which are one group
    here.

    Raises TypeError for another optimizer, TypeError or ValueError for settings that are missing or cannot work, and
    ValueError, in one list, for all parameters that are missing, unknown, of another branch, of another shape or with
    other state. Then nothing has changed.
    """
    known = _checked_source(optimizer, source, adamw_state_dict)
    what = f"the state of source={source!r}"
    entries = _checked_entries(what, state_dict, known)
    by_order = names is None and source == "adamw" and all(entry.name is None for entry in entries)
    likely = source_of(state_dict)
    if (likely == THIS_PACKAGE) != (source == OTHER_GROUPS) or (source in _SURE and likely != source):
        raise ValueError(f"the state was not saved by source={source!r}: {advice_for(likely)}")
    if source == OTHER_GROUPS:
        return regroup_(optimizer, entries if names is None else _named(entries, names))
    if adamw_state_dict is not None:
        others = _checked_entries("adamw_state_dict", adamw_state_dict, known)
        entries += [entry._replace(branch="adamw") for entry in others]
    names = names_in_order(shapes_by_group(entries), given_parameters(optimizer)) if by_order else names
    other = [] if likely in (source, None) else [advice_for(likely)]
    hints = [_ORDER_OF_NAMES] if names is not None and not by_order else []
    entries = entries if names is None else _named(entries, names)
    target = optimizer.state_dict()
    pairs, unmatched, problems = matched(parameters_of(target, optimizer.param_groups), entries, known)
    numbers = given_groups(optimizer) if by_order else None
    problems += orders_that_may_differ([pair for pair in pairs if by_order or pair[1].name is None], numbers)
    lacking = [parameter for parameter in unmatched if parameter.state]  # a frozen parameter has no state
    kept_branch = "adamw" if source in _BESIDE_ADAMW and all(entry.branch == "muon" for entry in entries) else None
    kept = [parameter for parameter in lacking if parameter.branch == kept_branch]
    problems += [f"{each.name} is missing in the source" for each in lacking if each.branch != kept_branch]
    if problems:
        raise ValueError(refusal(problems, [*hints, *hints_on_order(pairs), *other]))
    files = [(what, state_dict), ("adamw_state_dict", adamw_state_dict or {"param_groups": ()})]
    check_needed(files, pairs, known, "".join(f": {text}" for text in other))
    state = {parameter.key: parameter.state for parameter in kept}
    state |= {parameter.key: _new_state(parameter, entry, known) for parameter, entry in pairs if entry.state}
    groups, notes = merged_groups(target["param_groups"], pairs, known)
    optimizer.load_state_dict({**target, "state": state, "param_groups": groups})
    anew = [parameter.name for parameter, entry in pairs if parameter.state and not entry.state]
    notes += _notes_on_rounding([parameter for parameter, entry in pairs if parameter.state and entry.state], state)
    return notes + _notes_on_kept([parameter.name for parameter in kept]) + _notes_on_new(anew)


def _checked_source(optimizer: Any, source: Any, adamw_state_dict: Any) -> Source:
    """Return the source of that name; TypeError or ValueError for arguments of `import_state` that cannot work."""
    if not isinstance(optimizer, Muon):
        raise TypeError(f"state is imported into a Muon of this package, got {type(optimizer).__name__}")
    known = SOURCES.get(source) if isinstance(source, str) else None
    if known is None:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    if adamw_state_dict is not None and source not in _BESIDE_ADAMW:
        raise ValueError(f"adamw_state_dict needs a source of {' or '.join(_BESIDE_ADAMW)}, got {source!r}")
    return known


def _checked_entries(what: str, state_dict: Mapping[str, Any], source: Source) -> list[Entry]:
    """Return the parameters of a file; raises the errors of `check_state_dict` and `check_settings`."""
    check_state_dict(state_dict)
    check_settings(what, state_dict["param_groups"], source)
    return entries_of(state_dict, source.branch_of)


def _named(entries: Sequence[Entry], names: Iterable[str]) -> list[Entry]:
    is_list = isinstance(names, Iterable) and not isinstance(names, (str, Tensor))
    in_order = list(names) if is_list else []
    if not is_list or not all(isinstance(name, str) for name in in_order):
        raise TypeError(f"names must be a list of the names of parameters, got {shortened(names)}")
    if len(in_order) != len(entries):
        raise ValueError(f"{len(in_order)} names were given for {len(entries)} parameters of the source")
    return [entry._replace(name=name) for entry, name in zip(entries, in_order)]


def _new_state(parameter: Entry, entry: Entry, source: Source) -> dict[str, Any]:
    """Return the state of a parameter of this optimizer from its entry in the source; weights stay as they are."""
    halves = {REMAINDER: parameter.state[REMAINDER]} if REMAINDER in parameter.state else {}
    return {**translated_state(entry.state, entry.group, parameter.branch, source), **halves}


def _notes_on_rounding(parameters: Sequence[Entry], state: Mapping[Any, Any]) -> list[str]:
    """Return a note for averages of AdamW that have a wider dtype in the source than those of half precision here."""
    rounded: dict[tuple[Any, Any], list[str]] = {}
    for parameter in parameters:
        if parameter.branch == "adamw":
            there, here = (each["exp_avg_sq"].dtype for each in (state[parameter.key], parameter.state))
            if here.itemsize < min(there.itemsize, 4):
                rounded.setdefault((there, here), []).append(parameter.name)
    return [
        f"averages of {listed(names)} are {there} in the source, and {here} here, as their parameters are: "
        "master_weights='split' keeps averages in float32"
        for (there, here), names in rounded.items()
    ]


def _notes_on_new(names: Sequence[str]) -> list[str]:
    """Return a note on parameters of which the source has no state, as before their first gradient."""
    return [f"the source has no state of {listed(names)}: it starts anew"] if names else []


def _notes_on_kept(names: Sequence[str]) -> list[str]:
    """Return a note on parameters of AdamW whose state a file of matrices alone does not bring."""
    if not names:
        return []
    return [
        f"AdamW's parameters, {listed(names)}, and their groups stay as they are. To import theirs too, pass "
        "adamw_state_dict, the state dict of the torch.optim.AdamW beside the source"
    ]
