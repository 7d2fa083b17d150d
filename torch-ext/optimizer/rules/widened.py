"""Steps of some parameters at a time, and of a part of a large one, so that there are copies of these alone.

Copies are wider where tensors have unlike dtypes, or one that is not computed in.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Iterable, Iterator, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.formats import HALF_DTYPES
from ..kernels.master_weights import joined, split_
from .fallback import FallbackRule, FallbackTensors, FallbackUpdate, runs_of
from .scaling import GradientScaling

# Elements of which there are copies at once, unless one row has more.
WIDENED_AT_ONCE = 1 << 25


class _Part(NamedTuple):
    """The tensors of a parameter, or of some of its rows; with the lower halves of master weights, if it has these."""

    parameter: Tensor
    gradient: Tensor
    average: Tensor
    square: Tensor
    step: Tensor
    remainder: Optional[Tensor]


def have_one_dtype(tensors: FallbackTensors, with_half: bool) -> bool:
    """Whether all of `tensors` have the same dtype, and not half precision, unless `with_half`."""
    dtypes = {tensors.parameters[0].dtype, tensors.averages[0].dtype, *map(attrgetter("dtype"), tensors.gradients)}
    return len(dtypes) == 1 and (with_half or dtypes.isdisjoint(HALF_DTYPES))


def fit_at_once(tensors: FallbackTensors) -> bool:
    """Whether there may be copies of all parameters at once."""
    return sum(map(Tensor.numel, tensors.parameters)) <= WIDENED_AT_ONCE


def update_widened_(
    update: FallbackUpdate,
    tensors: FallbackTensors,
    rule: FallbackRule,
    scaling: GradientScaling,
    remainders: Optional[Sequence[Tensor]] = None,
) -> None:
    """Apply `update` to `tensors` in float32, or in float64 if parameters are; changes them in place, but no gradients.

    `update` gets at most WIDENED_AT_ONCE elements of parameters at a time, or one row: tensors of that dtype
    themselves, and copies of others. With the lower halves of bfloat16 parameters, int16 `remainders`, nothing is
    rounded. Otherwise each element of parameters and averages in half precision is rounded once.
    """
    for parts in runs_of(_parts(tensors, remainders), WIDENED_AT_ONCE):
        _update_copies_(update, parts, rule, scaling)


def _parts(tensors: FallbackTensors, remainders: Optional[Sequence[Tensor]]) -> Iterator[_Part]:
    """Yield the tensors of each parameter, in several parts if it has more than WIDENED_AT_ONCE elements."""
    for part in map(_Part, *tensors, remainders or [None] * len(tensors.steps)):
        count = part.parameter.numel()
        if count <= WIDENED_AT_ONCE:
            yield part
        else:
            yield from _cut(part, max(1, WIDENED_AT_ONCE * len(part.parameter) // count))


def _cut(part: _Part, rows: int) -> Iterator[_Part]:
    """Yield the parts of `rows` rows of a parameter. Each update counts a step: all but the last have copies of it."""
    tensors = {field: t for field, t in part._asdict().items() if t is not None and field != "step"}
    *others, last = zip(*(t.split(rows) for t in tensors.values()))
    for each in others:
        yield part._replace(**dict(zip(tensors, each)), step=part.step.clone())
    yield part._replace(**dict(zip(tensors, last)))


def _update_copies_(
    update: FallbackUpdate, parts: Iterable[_Part], rule: FallbackRule, scaling: GradientScaling
) -> None:
    parameters, gradients, averages, squares, steps, remainders = map(list, zip(*parts))
    has_halves, dtype = remainders[0] is not None, torch.promote_types(parameters[0].dtype, torch.float32)
    masters = list(map(joined, parameters, remainders)) if has_halves else _widened(parameters, dtype)
    wide = [_widened(column, dtype) for column in (gradients, averages, squares)]
    update(FallbackTensors(masters, *wide, steps), rule, scaling)
    for kept, results in zip((averages, squares), wide[1:]):
        _keep_(kept, results)
    if not has_halves:
        _keep_(parameters, masters)
        return
    for parameter, remainder, master in zip(parameters, remainders, masters):
        split_(parameter, remainder, master)


def _widened(column: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors in a dtype: `column` itself if they have it. `float()` costs the host less time than `to`."""
    if all(t.dtype == dtype for t in column):
        return column
    return [t.float() for t in column] if dtype == torch.float32 else [t.to(dtype) for t in column]


def _keep_(kept: list[Tensor], results: list[Tensor]) -> None:
    """Copy results into the tensors that are kept, unless these are the results themselves."""
    if kept is not results:
        torch._foreach_copy_(kept, results)
