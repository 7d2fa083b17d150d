"""The state that the last step has seen, for the next one to compare."""

from __future__ import annotations

import itertools
import operator
import weakref
from typing import Any, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..parameters.settings import Group
from ..parameters.state import KEYS, State
from ..plan.layout import local_part
from .premises import places_of
from .state import check_memory

_BYTES, _DTYPE = operator.attrgetter("nbytes"), operator.attrgetter("dtype")


class KnownState:
    """The state of all parameters that was checked last: whose it is, and what kind of tensors it has.

    Every step compares it, because nothing tells when somebody removes or replaces some of it. References are weak, so
    nobody keeps tensors that are replaced. Of changes inside of a tensor, as by `.data`, those of its place, bytes and
    dtype are noticed: kernels would read and write behind the end of a smaller one, or of freed memory.
    """

    def __init__(self, state: State):
        self._tensors, self._kinds = _references_and_contents(state), _kinds(state)

    def holds(self, state: State, groups: Sequence[Group]) -> bool:
        """Return whether `state` is of the same parameters in the same order, with tensors of the same kind.

        What else wrappers keep there does not matter. It remembers the tensors that it has compared, and looks at each
        of them only if some were replaced since. Raises ValueError if those share memory (`check_memory`).
        """
        known, *before = self._tensors
        try:
            references, *now = _references_and_contents(state)
        except RuntimeError:  # one that steps use has no memory: `check_tensors` says so
            return False
        if now == before and all(map(operator.is_, references, known)):  # almost always
            return True
        if _kinds(state) != self._kinds:
            return False
        check_memory(groups, state)
        self._tensors = references, *now
        return True


def _references_and_contents(state: State) -> tuple[list[weakref.ref], list[int], list[int], list[torch.dtype]]:
    """Return weak references to all tensors, and of each where it lies (`places_of`), its bytes and its dtype.

    There is no loop in Python, unless tensors are sharded or somebody keeps other things beside them.
    """
    try:
        tensors = list(itertools.chain.from_iterable(map(dict.values, state.values())))
    except TypeError:  # somebody keeps a number beside the states
        tensors = [value for each in state.values() if isinstance(each, dict) for value in each.values()]
    if not all(issubclass(kind, Tensor) for kind in set(map(type, tensors))):
        tensors = [value for value in tensors if isinstance(value, Tensor)]
    try:
        places = places_of(tensors)
    except RuntimeError:  # one has no memory, such as a sparse one: if a wrapper keeps it, that does not matter
        values = (each.get(key) for each in state.values() if isinstance(each, dict) for key in KEYS)
        tensors = [value for value in values if isinstance(value, Tensor)]
        places = places_of(tensors)
    return list(map(weakref.ref, tensors)), places, list(map(_BYTES, tensors)), list(map(_DTYPE, tensors))


def _kinds(state: State) -> list[Any]:
    """Return parameter, key, and form of each tensor that a step may use."""
    entries = [(id(p), key, each.get(key)) for p, each in state.items() if isinstance(p, Tensor) for key in KEYS]
    return [(*of, type(x), *(_form(x) if isinstance(x, Tensor) else ())) for *of, x in entries]


def _form(x: Tensor) -> tuple[Any, ...]:
    """Return shape, dtype and device of a tensor, whether it can change, and how it lies in memory and on ranks."""
    part = local_part(x)
    steps = tuple(step for size, step in zip(part.shape, part.stride()) if size > 1)
    spec = x._spec if isinstance(x, DTensor) else None
    return x.shape, x.dtype, x.device, x.is_inference(), part.shape, steps, spec
