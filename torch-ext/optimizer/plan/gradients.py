"""Whether gradients are such as a step can take."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..parameters.groups import names_of
from ..parameters.settings import Group
from .layout import has_shards, local_part


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
        if sharded and not _lie_alike(p, gradient):
            raise ValueError(
                f"{_name_in(groups, p)} {tuple(p.shape)} with placements {getattr(p, 'placements', 'none')} and a part "
                f"{tuple(local_part(p).shape)} has a gradient with {getattr(gradient, 'placements', 'none')} and "
                f"{tuple(local_part(gradient).shape)}; bring it in line before the step: "
                "p.grad = p.grad.redistribute(placements=p.placements)"
            )


def _name_in(groups: Sequence[Group], p: Tensor) -> str:
    return next(name for group in groups for name, other in zip(names_of(group), group["params"]) if other is p)


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    if not isinstance(a, DTensor) or not isinstance(b, DTensor):
        return isinstance(a, DTensor) == isinstance(b, DTensor)
    if a._local_tensor.shape != b._local_tensor.shape:
        return False
    a, b = a._spec, b._spec
    # The same object nearly always, and DTensors compare their meshes rank by rank.
    return a.placements == b.placements and (a.mesh is b.mesh or a.mesh == b.mesh)
