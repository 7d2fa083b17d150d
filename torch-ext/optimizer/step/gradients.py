"""The gradients of a step: checks, and how those that are laid out otherwise are redistributed."""

from __future__ import annotations

from operator import attrgetter
from typing import Collection, Optional, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..kernels.formats import HALF_DTYPES
from ..parameters.names import named_parameters
from ..parameters.settings import Group
from ..plan.layout import are_on_one_mesh, has_shards, layout_of, lie_alike, local_part
from ..plan.process_groups import Ranks, explaining_timeouts, this_rank
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


def check_gradients(premises: Premises, gradients: Gradients, groups: Sequence[Group]) -> list[int]:
    """Return the numbers of the gradients laid out otherwise than their parameters, but on the same mesh.

    Raises ValueError unless gradients are dense, of their parameter's shape, in a dtype that goes with its dtype, and
    on its mesh, and for a parameter whose memory is gone. `groups` have the names of the parameters.
    """
    sharded = premises.has_shards or has_shards(gradients.kinds)
    columns = range(len(premises.params)), premises.params, premises.shapes, premises.dtypes, gradients.tensors
    if gradients.absent:
        _check_memory([premises.params[i] for i in gradients.absent], groups)
        present = [i for i in range(len(gradients.tensors)) if i not in gradients.absent]
        columns = tuple([column[i] for i in present] for column in columns)
    _, _, shapes, dtypes, tensors = columns
    # The usual case: with `map` no Python code runs for each gradient.
    as_read = list(map(_DTYPE, tensors))
    dtypes_fit = as_read == dtypes or all(each in _readable_beside(dtype) for dtype, each in set(zip(dtypes, as_read)))
    as_parameters = list(map(_SHAPE, tensors)) == shapes and dtypes_fit
    if not sharded and as_parameters and set(map(_LAYOUT, tensors)) <= {torch.strided}:
        return []
    elsewhere = []
    for number, p, shape, dtype, gradient in zip(*columns):
        if gradient.layout != torch.strided or gradient.shape != shape or gradient.dtype not in _readable_beside(dtype):
            raise ValueError(_misfit(_name_in(groups, p), gradient, shape, dtype))
        if not sharded or lie_alike(p, gradient):
            continue
        if not are_on_one_mesh(p, gradient) or p.placements == gradient.placements:
            raise ValueError(
                f"{_name_in(groups, p)} {tuple(p.shape)} is {_place(p)}, and its gradient is {_place(gradient)}; bring "
                f"it in line before the step: {_in_line(p, gradient)}"
            )
        elsewhere.append(number)
    return elsewhere


def _readable_beside(dtype: torch.dtype) -> Sequence[torch.dtype]:
    """Return the dtypes in which a step reads the gradient of a parameter in `dtype` without rounding it."""
    return list(dict.fromkeys((dtype, torch.float32, *HALF_DTYPES)))


def _misfit(name: str, gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> str:
    """Return what to say of a gradient that is sparse, or in a shape or dtype that does not go with its parameter."""
    if gradient.layout != torch.strided:
        return (
            f"gradients must be dense, that of {name} is {gradient.layout}: write nn.Embedding(..., sparse=False), or "
            "leave the parameter out and update it by torch.optim.SparseAdam"
        )
    if gradient.shape != shape:
        return f"the gradient of {name} has shape {tuple(gradient.shape)}, needs {tuple(shape)}, its parameter's"
    allowed = " or ".join(map(str, _readable_beside(dtype)))
    return (
        f"the gradient of {name} is in {gradient.dtype}, needs {allowed}: leave p.grad_dtype as it is, or write before "
        "the step: g, p.grad = p.grad, None; p.grad_dtype = p.dtype; p.grad = g.to(p.dtype)"
    )


def _place(x: Tensor) -> str:
    """Return how a tensor lies on ranks, and the shape of what this rank has of it."""
    if not isinstance(x, DTensor):
        return f"a plain tensor {tuple(x.shape)}"
    return f"a DTensor {x.placements} on {x.device_mesh} with a part {tuple(local_part(x).shape)}"


def _in_line(p: Tensor, gradient: Tensor) -> str:
    """Return the line that makes a gradient lie as its parameter does."""
    if not isinstance(p, DTensor):
        return "p.grad = p.grad.full_tensor()"
    whole = "p.grad.full_tensor()" if isinstance(gradient, DTensor) else "p.grad"
    return f"p.grad = distribute_tensor({whole}, p.device_mesh, p.placements, src_data_rank=None)"


def _check_memory(params: Sequence[Tensor], groups: Sequence[Group]) -> None:
    """Raise ValueError if one of these, which have no gradients, has lost its memory.

    After a forward pass FSDP2's root has whole parameters until the backward pass, and its gradients are those of the
    shards. An optimizer that was made in between would never train them.
    """
    for p in params:
        if p.requires_grad and not isinstance(p, DTensor) and p.numel() and not p.untyped_storage().size():
            raise ValueError(
                f"the memory of {_name_in(groups, p)} {tuple(p.shape)} is gone, and it has no gradient: FSDP2 had "
                "gathered it when this optimizer was made, as after a forward pass without a backward pass. Make the "
                "optimizer before any forward pass, or call model.reshard() first"
            )


def layouts_of(gradients: Gradients, numbers: Sequence[int], params: Sequence[Tensor]) -> dict[Tensor, str]:
    """Return, for the parameters of these numbers, how their gradients lie on ranks, and in which dtype."""
    tensors = ((params[number], gradients.tensors[number]) for number in numbers)
    return {p: f"{gradient.placements} in {gradient.dtype}" for p, gradient in tensors}


def redistribute_(
    gradients: Gradients, numbers: Sequence[int], params: Sequence[Tensor], skipping: Collection[Ranks]
) -> None:
    """Lay the gradients of these numbers out as their parameters are; `p.grad` stays as it is.

    Collective: all ranks of a parameter's mesh must call it for the same parameters. Under tensor parallelism a rank
    may have one term of a sum, or the whole gradient of a sharded parameter. The sets of ranks in `skipping` change
    nothing in this step, as after they disagreed, and do not wait for each other: zeros take the place of their
    gradients.
    """
    members = {number: layout_of("", params[number]).mesh.members for number in numbers}
    # In the order of the sets of ranks, which is the same everywhere: that of parameters of two meshes may not be.
    for number in sorted((number for number in numbers if this_rank() in members[number]), key=members.get):
        p, gradient = params[number], gradients.tensors[number]
        if members[number] in skipping:
            gradients.tensors[number] = torch.zeros_like(p)
            continue
        with explaining_timeouts("gradients"):
            gradients.tensors[number] = gradient.redistribute(p.device_mesh, p.placements)


def _name_in(groups: Sequence[Group], p: Tensor) -> str:
    return next(name for group in groups for name, other in named_parameters(group) if other is p)
