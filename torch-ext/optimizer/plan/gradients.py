"""Whether gradients are such as a step can take."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from ..parameters.groups import names_of
from ..parameters.settings import Group
from .layout import has_shards, lie_alike, local_part


def check_gradients(params: Sequence[Tensor], shapes: Sequence[torch.Size], groups: Sequence[Group]) -> None:
    """Raise ValueError unless gradients are dense, of their parameter's shape and lie on ranks as that does.

    `groups` have the names of `params`.
    """
    gradients = [p.grad for p in params]
    sharded = has_shards([*map(type, params), *map(type, gradients)])
    for p, shape, gradient in zip(params, shapes, gradients):
        if gradient is None:
            continue
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
