"""The gradients of a step, and whether they are such as a step can take."""

from __future__ import annotations

from operator import attrgetter
from typing import Optional, Sequence

import torch
from torch import Tensor

from ..parameters.groups import names_of
from ..parameters.settings import Group
from .layout import has_shards, lie_alike, local_part
from .premises import Premises

_LAYOUT, _SHAPE, _DTYPE = attrgetter("layout"), attrgetter("shape"), attrgetter("dtype")


class Gradients:
    """The gradients of parameters when a step begins, and what is asked of all of them at once."""

    def __init__(self, params: Sequence[Tensor]):
        self.tensors: list[Optional[Tensor]] = [p.grad for p in params]
        self.kinds = set(map(type, self.tensors))
        some_lack = type(None) in self.kinds
        # The numbers of the parameters without a gradient.
        self.absent = frozenset([i for i, each in enumerate(self.tensors) if each is None] if some_lack else ())


def check_gradients(premises: Premises, gradients: Gradients, groups: Sequence[Group]) -> None:
    """Raise ValueError unless gradients are dense, of their parameter's shape and dtype, and lie on ranks as that does.

    `groups` have the names of the parameters.
    """
    sharded = premises.has_shards or has_shards(gradients.kinds)
    columns = premises.params, premises.shapes, premises.dtypes, gradients.tensors
    if gradients.absent:
        present = [i for i in range(len(gradients.tensors)) if i not in gradients.absent]
        columns = tuple([column[i] for i in present] for column in columns)
    _, shapes, dtypes, tensors = columns
    # Almost always: with `map` no Python code runs for each.
    as_parameters = list(map(_SHAPE, tensors)) == shapes and list(map(_DTYPE, tensors)) == dtypes
    if not sharded and as_parameters and set(map(_LAYOUT, tensors)) <= {torch.strided}:
        return
    for p, shape, dtype, gradient in zip(*columns):
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
        if gradient.dtype != dtype:
            raise ValueError(
                f"the gradient of {_name_in(groups, p)} is in {gradient.dtype}, needs {dtype}, its parameter's: leave "
                "p.grad_dtype as it is, or write before the step: "
                "g, p.grad = p.grad, None; p.grad_dtype = p.dtype; p.grad = g.to(p.dtype)"
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
