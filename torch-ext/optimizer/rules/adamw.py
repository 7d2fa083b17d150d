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
    wide = given
    if isinstance(weight_decay, Tensor):  # decays in a pass of its own, in which half precision would lose it
        wide = [tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors) for tensors in given]
    steps = [s.step for s in states]
    pieces = [(used, own, step) for tensors, step in zip(wide, steps) for used, own in _as_vectors(*tensors)]
    parameters, gradients, averages, squares = ([used[k] for used, _, _ in pieces] for k in range(4))
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
        [step for _, _, step in pieces],
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
    for used, own in [*((used, own) for used, own, _ in pieces), *zip(wide, given)]:
        for k in (0, 2, 3):
            if own[k] is not used[k]:
                own[k].copy_(used[k] if used[k].shape == own[k].shape else used[k][: own[k].numel()].view_as(own[k]))


def _as_vectors(*tensors: Tensor) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Return `tensors` in pieces that torch's kernel can work on, and what those stand for: copies go back there.

    The kernel for CPUs walks all four through memory in the same order and looks at no strides: with a transposed
    gradient it would silently pair the wrong elements. What is left behind the last whole vector gets zeros behind it.
    """
    first = tensors[0]
    rest = first.numel() % _VECTOR if first.device.type == "cpu" else 0
    dense = first.is_contiguous() or torch.empty_like(first).stride() == first.stride()
    if not (dense and all(t.stride() == first.stride() for t in tensors)):
        return [(tuple(_padded(t.reshape(-1), rest) for t in tensors), tensors)]
    if not rest:
        return [(tensors, tensors)]
    flat = [t.as_strided((t.numel(),), (1,)) for t in tensors]
    whole, tail = tuple(t[:-rest] for t in flat), tuple(t[-rest:] for t in flat)
    behind = [(tuple(_padded(t, rest) for t in tail), tail)]
    return [(whole, whole), *behind] if first.numel() > rest else behind


def _padded(flat: Tensor, rest: int) -> Tensor:
    """Return a copy of `flat`, with zeros behind it if its last vector has only `rest` elements."""
    return torch.nn.functional.pad(flat, (0, -rest % _VECTOR)) if rest else flat.clone()
