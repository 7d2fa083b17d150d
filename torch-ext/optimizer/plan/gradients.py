"""Whether gradients are such as a step can take."""

from __future__ import annotations

import itertools
from operator import attrgetter
from typing import Optional, Sequence

import torch
from torch import Tensor

from ..parameters.groups import names_of
from ..parameters.settings import Group
from .layout import has_shards, lie_alike, local_part

_LAYOUT, _SHAPE = attrgetter("layout"), attrgetter("shape")


def check_gradients(
    params: Sequence[Tensor],
    gradients: Sequence[Optional[Tensor]],
    shapes: Sequence[torch.Size],
    groups: Sequence[Group],
) -> None:
    """Raise ValueError unless gradients are dense, of their parameter's shape and lie on ranks as that does.

    `groups` have the names of `params`.
    """
    is_there = [gradient is not None for gradient in gradients]
    if not all(is_there):
        params, gradients, shapes = (list(itertools.compress(each, is_there)) for each in (params, gradients, shapes))
    sharded = has_shards(map(type, itertools.chain(params, gradients)))
    # Almost always: with `map` no Python code runs for each.
    if not sharded and set(map(_LAYOUT, gradients)) <= {torch.strided} and list(map(_SHAPE, gradients)) == shapes:
        return
    for p, shape, gradient in zip(params, shapes, gradients):
        if gradient.layout != torch.strided:
            raise ValueError(
                f"gradients must be dense, that of {_name_in(groups, p)} is {gradient.layout}: write nn.Embedding(..., "
                "sparse=False), or leave the parameter out and update it by torch.optim.SparseAdam"
            )
        if gradient.shape != shape:
            raise ValueError(
                f"the gradient of {_name_in(groups, p)} has shape {tuple(gradient.shape)}, needs {tuple(shape)}, its "
                "parameter's"
            )
        if sharded and not lie_alike(p, gradient):
            raise ValueError(
                f"{_name_in(groups, p)} {tuple(p.shape)} with placements {getattr(p, 'placements', 'none')} and a part "
                f"{tuple(local_part(p).shape)} has a gradient with {getattr(gradient, 'placements', 'none')} and "
                f"{tuple(local_part(gradient).shape)}; bring it in line before the step: "
                "p.grad = p.grad.redistribute(placements=p.placements)"
            )


def _name_in(groups: Sequence[Group], p: Tensor) -> str:
    return next(name for group in groups for name, other in zip(names_of(group), group["params"]) if other is p)
