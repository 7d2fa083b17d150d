"""Import of another optimizer's state: parameters are matched, momentum is rescaled, settings are translated."""

from __future__ import annotations

from numbers import Real
from reprlib import repr as shortened
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Optional, Sequence, Union

from torch import Tensor

from ..muon import Muon
from ..parameters.argument_checks import check_state_dict
from ..parameters.checkpoints import THIS_PACKAGE, advice_for, source_of
from ..parameters.groups import listed, names_of
from ..parameters.names import bare_name, repeated
from ..parameters.state import MOMENTS, REMAINDER
from .state_checks import check_groups
from .state_order import given_groups, given_parameters, names_in_order, orders_that_may_differ, shapes_by_group
from .state_settings import merged_groups
from .state_sources import SOURCES, Settings, Source, branch_by_flag, translated_state

_BRANCHES = ("muon", "adamw")
# Sources whose files are recognised with certainty, by keys that they always have, even before the first step.
_SURE = ("torch", "adamw")
# How many problems an error lists.
SHOWN = 20
# State that does not have the parameter's shape; loading checks it.
_OTHERWISE = ("step", "variance_neuron")


class Entry(NamedTuple):
    """One parameter in a state dict; `branch` is None if it never had a gradient and nothing else shows the branch."""

    key: Union[int, str]
    name: Optional[str]
    branch: Optional[str]
    group: Settings
    state: Mapping[str, Any]
    shape: tuple[int, ...] = ()  # set only for parameters of the optimizer into which state is imported


def import_state(
    optimizer: Muon,
    state_dict: Mapping[str, Any],
    source: str = "torch",
    *,
    adamw_state_dict: Optional[Mapping[str, Any]] = None,
    names: Optional[Iterable[str]] = None,
) -> list[str]:
    """Load another optimizer's `state_dict` into `optimizer` in place; return sentences about what was not imported.

    The state of the parameters and the settings of their groups are replaced, learning rates included: each group then
    has an `lr` of its own, with an `lr_factor` of 1. Tensors are copied; momentum keeps its dtype, unless this
    optimizer has it in 8 bits. Lower halves of `master_weights` stay as they are.

    Args:
        source: `torch` (torch.optim.Muon), `timm` (with its AdamW or NAdamW), `keller_jordan` (any class of muon.py),
            `motif`, `moonlight` (toy_train.py), `dion` (its Muon), `dion_normuon` (its NorMuon), or `adamw`
            (torch.optim.AdamW or Adam alone).
        adamw_state_dict: the state dict of the torch.optim.AdamW used next to a torch.optim.Muon. Without it the state
            of parameters that are not matrices is not changed.
        names: names of the source's parameters in its order, those of `adamw_state_dict` last. Without `names`, the
            names in its groups count, and otherwise the order: its k-th matrix is this optimizer's k-th matrix, and the
            same for the other parameters. For `adamw`, each group of the source must have its parameters in the order
            in which they were passed to this optimizer, such as model.parameters(); shapes decide between groups.
            Order is not enough if parameters of one shape are in more groups here than in the source, as they are
            with `groups_for`, which does not keep the model's order.

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
    if not isinstance(optimizer, Muon):
        raise TypeError(f"state is imported into a Muon of this package, got {type(optimizer).__name__}")
    known = SOURCES.get(source) if isinstance(source, str) else None
    if known is None or (adamw_state_dict is not None and source != "torch"):
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, torch with adamw_state_dict, got {source!r}")
    entries = _entries(state_dict, known.branch_of)
    by_order = names is None and source == "adamw" and all(entry.name is None for entry in entries)
    likely = source_of(state_dict)
    if likely == THIS_PACKAGE or (source in _SURE and likely != source):
        raise ValueError(f"the state was not saved by source={source!r}: {advice_for(likely)}")
    advice = "" if likely == source else f": {advice_for(likely)}"
    check_groups(f"the state of source={source!r}", state_dict["param_groups"], entries, known, advice)
    if adamw_state_dict is not None:
        others = [entry._replace(branch="adamw") for entry in _entries(adamw_state_dict, known.branch_of)]
        check_groups("adamw_state_dict", adamw_state_dict["param_groups"], others, known)
        entries += others
    names = names_in_order(shapes_by_group(entries), given_parameters(optimizer)) if by_order else names
    entries = entries if names is None else _named(entries, names)
    target = optimizer.state_dict()
    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    parameters = [each._replace(shape=shape) for each, shape in zip(_entries(target, branch_by_flag), shapes)]
    pairs, unmatched, problems = _matched(parameters, entries, known)
    given = given_groups(optimizer) if by_order else None
    problems += orders_that_may_differ([pair for pair in pairs if by_order or pair[1].name is None], given)
    state = {}
    for parameter in unmatched:
        if not parameter.state:  # a frozen parameter has no state
            continue
        if source == "torch" and adamw_state_dict is None and parameter.branch == "adamw":
            state[parameter.key] = parameter.state
        else:
            problems.append(f"{parameter.name} is missing in the source")
    if problems:
        raise ValueError(_refusal(problems, source, likely))
    state |= {parameter.key: _new_state(parameter, entry, known) for parameter, entry in pairs if entry.state}
    groups, notes = merged_groups(target["param_groups"], pairs, known)
    optimizer.load_state_dict({**target, "state": state, "param_groups": groups})
    return notes


def _new_state(parameter: Entry, entry: Entry, source: Source) -> dict[str, Any]:
    """Return the state of a parameter of this optimizer from its entry in the source; weights stay as they are."""
    halves = {REMAINDER: parameter.state[REMAINDER]} if REMAINDER in parameter.state else {}
    return {**translated_state(entry.state, entry.group, parameter.branch, source), **halves}


def _entries(state_dict: Mapping[str, Any], branch_of: Callable[..., Optional[str]]) -> list[Entry]:
    """Return the parameters of a state dict in its order; raises the errors of `check_state_dict`."""
    check_state_dict(state_dict)
    entries = []
    for group in state_dict["param_groups"]:
        names = names_of(group) if "param_names" in group else group.get("names") or [None] * len(group["params"])
        for key, name in zip(group["params"], names):
            state = state_dict["state"].get(key, {})
            if not isinstance(state, Mapping):
                raise TypeError(f"the state of parameter {key} must be a dict, got {shortened(state)}")
            state = dict(state)
            branch = branch_of(group, state)
            state.pop("use_muon", None)  # timm and Moonlight store the branch there
            if state and branch == "adamw" and "step" not in state and "step" in group:  # dion counts steps by group
                state["step"] = group["step"]
            # Distributed checkpoints have names in place of positions.
            entries.append(Entry(key, key if isinstance(key, str) else name, branch, group, state))
    return entries


def _named(entries: Sequence[Entry], names: Iterable[str]) -> list[Entry]:
    given, names = names, list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [None]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"names must be a list of the names of parameters, got {shortened(given)}")
    if len(names) != len(entries):
        raise ValueError(f"{len(names)} names were given for {len(entries)} parameters of the source")
    return [entry._replace(name=name) for entry, name in zip(entries, names)]


def _refusal(problems: Sequence[str], source: str, likely: Optional[str]) -> str:
    """Return the text of an error: all problems, or the first ones of very many, and the source that fits better."""
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    other = [advice_for(likely)] if likely != source else []
    return "\n  ".join(["the state does not fit:", *problems[:SHOWN], *more, *other])


def _matched(
    parameters: list[Entry], entries: list[Entry], source: Source
) -> tuple[list[tuple[Entry, Entry]], list[Entry], list[str]]:
    """Return pairs of parameter and entry (by name, then by order), parameters without an entry, and all problems."""
    known = [entry for entry in entries if entry.name is not None]
    pairs, strangers = _matched_by_name(parameters, known)
    unmatched, problems = [], [f"{entry.name} of the source is not here, or comes twice" for entry in strangers]
    twice = {*repeated(entry.name for entry in known), *repeated(parameter.name for parameter in parameters)}
    problems += [
        f"several parameters are called {name}: names have to tell them apart. Construct this optimizer from "
        f'module.named_parameters(prefix="..."), and pass `names` of the source'
        for name in sorted(twice & {entry.name for entry in known})
    ]
    named = {parameter.key for parameter, _ in pairs}
    unclear = {str(entry.branch) for entry in entries if entry.name is None} - set(_BRANCHES)
    if unclear:
        problems.append(f"the branch of parameters without a name is unclear in the source: {', '.join(unclear)}")
    for branch in _BRANCHES:
        rest = [parameter for parameter in parameters if parameter.branch == branch and parameter.key not in named]
        unnamed = [entry for entry in entries if entry.branch == branch and entry.name is None]
        if not unnamed:
            unmatched += rest
        elif len(rest) != len(unnamed):
            meet = f"{len(rest)}: {listed([parameter.name for parameter in rest])}"
            problems.append(
                f"the source has {len(unnamed)} {branch} parameters without names, this optimizer {meet}. Pass names, "
                "those of the source in its order, and route as the source does, with is_muon or use_muon"
            )
        else:
            if source.sorts and any(map(_other_shapes, rest, unnamed)):
                rest = sorted(rest, key=lambda parameter: parameter.shape, reverse=True)
            pairs += zip(rest, unnamed)
    return pairs, unmatched, problems + [text for pair in pairs for text in _misfits(*pair, source)]


def _matched_by_name(
    parameters: Sequence[Entry], entries: Sequence[Entry]
) -> tuple[list[tuple[Entry, Entry]], list[Entry]]:
    """Return pairs of parameter and entry, and the entries without a parameter.

    Whole names are compared first, then names without the components of wrappers: PEFT's `original_module` and
    `modules_to_save` differ only in these.
    """
    pairs, rest = [], list(entries)
    for key in str, bare_name:
        taken = {parameter.key for parameter, _ in pairs}
        by_name = {key(parameter.name): parameter for parameter in parameters if parameter.key not in taken}
        found = [(by_name.pop(key(entry.name), None), entry) for entry in rest]
        pairs += [(parameter, entry) for parameter, entry in found if parameter is not None]
        rest = [entry for parameter, entry in found if parameter is None]
    return pairs, rest


def _misfits(parameter: Entry, entry: Entry, source: Source) -> list[str]:
    if entry.branch not in (parameter.branch, None):
        return [f"{parameter.name} belongs to {entry.branch} in the source, and to {parameter.branch} here"]
    wanted = set(source.state[parameter.branch].values())
    unused = source.unused if parameter.branch == "muon" else frozenset()
    if entry.state and set(entry.state) - unused != wanted:
        return [f"{parameter.name} needs the state {', '.join(sorted(wanted))}, got {', '.join(sorted(entry.state))}"]
    values = {key: value for key, value in sorted(entry.state.items()) if key in wanted}
    wrong = [f"{key}={shortened(value)}" for key, value in values.items() if not _is_value(key, value)]
    if wrong:
        return [f"{parameter.name} needs tensors as state and a number as step, the source has {', '.join(wrong)}"]
    if entry.state and MOMENTS in parameter.state and MOMENTS not in source.state[parameter.branch]:
        return [
            f"{parameter.name} needs the state {', '.join(parameter.state)}, got {', '.join(wanted)}: construct the "
            "optimizer with second_moment='none', and set it in its groups after the import"
        ]
    other_shapes = _other_shapes(parameter, entry).items()
    return [
        f"{parameter.name} is {parameter.shape} here, its {key} in the source {shape}" for key, shape in other_shapes
    ]


def _is_value(key: str, value: Any) -> bool:
    """Whether a value of a state is a tensor, or, as the step of old files, a number."""
    return isinstance(value, Tensor) or (key == "step" and isinstance(value, Real))


def _other_shapes(parameter: Entry, entry: Entry) -> dict[str, tuple[int, ...]]:
    """Return the shapes of state tensors that differ from the parameter's and should not."""
    shapes = {key: tuple(value.shape) for key, value in entry.state.items() if isinstance(value, Tensor)}
    return {key: shape for key, shape in shapes.items() if key not in _OTHERWISE and shape != parameter.shape}
