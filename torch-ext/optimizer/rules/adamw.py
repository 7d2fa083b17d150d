"""AdamW for the parameters that are no matrices, by torch's own fused kernel."""

from __future__ import annotations

from typing import NamedTuple, Sequence, Union

import torch
from torch import Tensor


class AdamWRule(NamedTuple):
    """The settings of one group; lr is a number or a 0-d tensor."""

    lr: Union[float, Tensor]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool


class AdamWState(NamedTuple):
    """One parameter's averages of gradients and of their squares, and the float32 count of its steps, a 0-d tensor."""

    average: Tensor
    square: Tensor
    step: Tensor


def adamw_(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[AdamWState], rule: AdamWRule
) -> None:
    """Take one AdamW step with `parameters`, of one device and dtype, and their `states`, both in place.

    Gradients are not changed; tensors may have any strides.
    Source: Loshchilov, Hutter, Decoupled weight decay regularization, arXiv:1711.05101, algorithm 2.
    """
    given = [(p, g, s.average, s.square) for p, g, s in zip(parameters, gradients, states)]
    used = [_laid_out_alike(*tensors) for tensors in given]
    parameters, gradients, averages, squares = ([row[k] for row in used] for k in range(4))
    steps = [s.step for s in states]
    lr = rule.lr.to(parameters[0].device) if isinstance(rule.lr, Tensor) else rule.lr
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        lr=lr,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        amsgrad=False,
        maximize=rule.maximize,
    )
    torch.autograd.graph.increment_version([*parameters, *averages, *squares])
    for (p, _, average, square), (p_used, _, average_used, square_used) in zip(given, used):
        for tensor, result in ((p, p_used), (average, average_used), (square, square_used)):
            if tensor is not result:
                tensor.copy_(result)


def _laid_out_alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `tensors`, or contiguous copies of those that need one.

    torch's fused kernel for CPUs walks all four through memory in the same order and looks at no strides: with a
    transposed gradient it would silently pair the wrong elements.
    """
    first = tensors[0]
    alike = all(t.stride() == first.stride() for t in tensors)
    if alike and (first.is_contiguous() or torch.empty_like(first).stride() == first.stride()):
        return tensors
    return tuple(t.contiguous() for t in tensors)
