"""What a plan was made for. Every step compares it with what is there, because nothing else reports a change."""

from __future__ import annotations

import operator
from typing import Any, Collection, Mapping, Optional, Sequence

from torch import Tensor

from ..kernels.formats import PLAIN_CLASSES
from ..parameters.names import MADE_UP, named_parameters
from ..parameters.routing import reason_of
from ..parameters.settings import Group
from ..plan.layout import laid_out, local_part
from ..plan.plan import choices, planned_settings
from ..plan.process_groups import this_rank


class Premises:
    """The parameters of groups, how they are laid out, and the settings on which a plan depends."""

    def __init__(self, params: Sequence[Tensor], absent: Collection[int], groups: Sequence[Group]):
        """`absent` are the numbers of the parameters that have no gradient."""
        self.params = params  # of all groups
        self.shapes = [p.shape for p in params]  # whole ones, also of parameters that ranks share
        self.dtypes = [p.dtype for p in params]
        self.device_types = {p.device.type for p in params}
        self._names = [name for group in groups for name, _ in named_parameters(group)]
        self._laid_out = laid_out(params)
        self._places = places_of(params)
        self._routes = {p: (group["use_muon"], reason_of(group)) for group in groups for p in group["params"]}
        self._frozen = _frozen(params, absent)
        self._settings = _settings_of(groups)

    @property
    def has_shards(self) -> bool:
        """Whether any of the parameters is a DTensor."""
        return self._laid_out.has_shards

    def check_names(self, before: Optional[Premises]) -> None:
        """Raise ValueError if a parameter now has a name that a user gave to another one: names decide routing."""
        if before is None:
            return
        known, taken = dict(zip(before.params, before._names)), set(before._names)
        for name, p in zip(self._names, self.params):
            if known.get(p, name) != name and name in taken and not MADE_UP.fullmatch(name):
                raise ValueError(
                    f"the parameter {known[p]} {tuple(p.shape)} would now get the name {name}, which another parameter "
                    "had before: if you remove or reorder a group's params, do the same with its param_names"
                )

    def reasons(self, known: Mapping[Tensor, str], before: Optional[Premises]) -> dict[Tensor, str]:
        """Return why these parameters have their branches: the `known` reasons, in their order, brought up to date.

        A parameter that a wrapper has put in the place of another one, with the same names as `before`, takes over its
        reason. One that has changed its branch since, because its group was changed, has the reason of its group.
        """
        same_names = before is not None and before._names == self._names
        successors = {p: p for p in self.params} | (dict(zip(before.params, self.params)) if same_names else {})
        reasons = {successors[p]: reason for p, reason in known.items() if p in successors}
        routes = self._routes if before is None else before._routes
        moved = [p for p, route in routes.items() if p in self._routes and self._routes[p][0] != route[0]]
        return {**reasons, **{p: self._routes[p][1] for p in moved if p in reasons}}

    def hold(self, params: Sequence[Tensor], absent: Collection[int], groups: Sequence[Group]) -> bool:
        """Return whether parameters, their layout, which of them are frozen, and settings are still the same."""
        return (
            _settings_of(groups) == self._settings  # so there are as many parameters
            and all(map(operator.is_, params, self.params))
            and _frozen(params, absent) == self._frozen
            and self._laid_out.describes(params)
        )

    def have_moved(self, params: Sequence[Tensor]) -> bool:
        """Return whether any of these parameters lies elsewhere in memory than it did."""
        return self._places != places_of(params)

    def remember_places(self, params: Sequence[Tensor]) -> None:
        """Take where these parameters lie in memory as their places from now on."""
        self._places = places_of(params)


def places_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return where the local part of each tensor lies: its address, or its device's number if it is no plain tensor."""
    if PLAIN_CLASSES.issuperset(map(type, tensors)):
        return list(map(Tensor.data_ptr, tensors))
    parts = map(local_part, tensors)
    return [part.data_ptr() if type(part) in PLAIN_CLASSES else part.get_device() for part in parts]


def _frozen(params: Sequence[Tensor], absent: Collection[int]) -> set[int]:
    # A frozen parameter with a gradient is trained.
    return {i for i in absent if not params[i].requires_grad}


def _settings_of(groups: Sequence[Group]) -> list[Any]:
    # A process may have another rank after its process group was destroyed and made anew.
    return [*(len(group["params"]) for group in groups), *planned_settings(groups), choices(), this_rank()]
