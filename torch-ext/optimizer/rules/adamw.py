"""AdamW for the parameters that are no matrices, by torch's own fused kernel."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from ..parameters import UNSCALED, GradientScaling
from .fallback import FallbackRule, FallbackState, uncount_overflow_

# Elements of the longest vector that torch's fused kernel works on, 64 bytes of half precision. On a CPU it rounds what
# is left behind the last whole one in another way, so that bits would depend on where a parameter is cut into shards.
_VECTOR = 32


def adamw_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[FallbackState],
    rule: FallbackRule,
    scaling: GradientScaling = UNSCALED,
) -> None:
    """Take one AdamW step with `parameters`, of one device and dtype, and their `states`, both in place.

    Gradients are not changed; tensors may have any strides. Gradients that overflowed change nothing. Each element of
    parameters and averages is rounded once, but for parameters of float32 or float64 whose weight decay is a tensor.
    An element gets the same bits in a whole parameter and in any part of it.
    Source: Loshchilov, Hutter, Decoupled weight decay regularization, arXiv:1711.05101, algorithm 2.
    """
    given = [(p, g, s.average, s.square) for p, g, s in zip(parameters, gradients, states)]
    lr, weight_decay = rule.lr, rule.weight_decay
    used = given
    if isinstance(weight_decay, Tensor):  # decays in a pass of its own, in which half precision would lose it
        used = [tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors) for tensors in given]
    used = [_as_vectors(*tensors) for tensors in used]
    parameters, gradients, averages, squares = ([row[k] for row in used] for k in range(4))
    steps = [s.step for s in states]
    if isinstance(lr, Tensor):
        lr = lr.to(parameters[0].device)
    if isinstance(weight_decay, Tensor):  # the fused kernel takes a number, for which the host would have to wait
        kept = (1 - lr * weight_decay.to(parameters[0].device)).to(parameters[0].dtype)
        torch._foreach_mul_(parameters, kept if scaling.found_inf is None else kept.where(scaling.found_inf == 0, 1))
        weight_decay = 0.0
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        parameters,
        # With a scale the kernel writes the unscaled gradients back.
        gradients if scaling.grad_scale is None else [g.clone() for g in gradients],
        averages,
        squares,
        [],
        steps,
        lr=lr,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        weight_decay=weight_decay,
        eps=rule.eps,
        amsgrad=False,
        maximize=rule.maximize,
        grad_scale=scaling.grad_scale,
        found_inf=scaling.found_inf,
    )
    uncount_overflow_(steps, scaling.found_inf)
    torch.autograd.graph.increment_version([*parameters, *averages, *squares])
    for (p, _, average, square), (p_used, _, average_used, square_used) in zip(given, used):
        for tensor, result in ((p, p_used), (average, average_used), (square, square_used)):
            if tensor is not result:
                tensor.copy_(result if tensor.shape == result.shape else result[: tensor.numel()].view_as(tensor))


def _as_vectors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `tensors`, or where torch's kernel cannot work on them flat copies, with zeros behind them on a CPU.

    The kernel for CPUs walks all four through memory in the same order and looks at no strides: with a transposed
    gradient it would silently pair the wrong elements.
    """
    first = tensors[0]
    alike = all(t.stride() == first.stride() for t in tensors)
    dense = first.is_contiguous() or torch.empty_like(first).stride() == first.stride()
    rest = -first.numel() % _VECTOR if first.device.type == "cpu" else 0
    if alike and dense and not rest:
        return tensors
    return tuple(torch.nn.functional.pad(t.reshape(-1), (0, rest)) for t in tensors)
