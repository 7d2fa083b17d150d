"""AdamW for the parameters that are not matrices, by torch's own fused kernel."""

from __future__ import annotations

from typing import Iterator, Sequence

import torch
from torch import Tensor

from .fallback import FallbackRule, FallbackTensors, uncount_overflow_
from .scaling import UNSCALED, GradientScaling

# Elements of the longest vector that torch's fused kernel works on: 64 bytes of half precision. On a CPU the kernel
# rounds what is left behind the last whole vector differently, so bits would depend on where a parameter is sharded.
_VECTOR = 32


def adamw_(tensors: Sequence[FallbackTensors], rule: FallbackRule, scaling: GradientScaling = UNSCALED) -> None:
    """Take one AdamW step with parameters of one device and dtype; all but the gradients of `tensors` change in place.

    Tensors may have any strides. Gradients that overflowed change nothing. Each element of parameters and averages is
    rounded once, except for float32 and float64 parameters whose weight decay is a tensor. An element gets the same
    bits in a whole parameter and in any part of it.
    Source: Loshchilov, Hutter, Decoupled weight decay regularization, arXiv:1711.05101, algorithm 2.
    """
    # A decay that is a tensor is a pass by itself, in which half precision would lose it.
    wide = [_promoted(each) for each in tensors] if isinstance(rule.weight_decay, Tensor) else tensors
    whole, pieces = [], []
    for each in wide:
        if _is_whole(each):
            whole.append(each)
        else:
            pieces += _as_vectors(each)
    torch._foreach_add_([each.step for each in tensors], 1)
    _fused_step_([*whole, *(used for used, _ in pieces)], rule, scaling)
    uncount_overflow_([each.step for each in tensors], scaling.found_inf)
    for used, target in pieces if wide is tensors else [*pieces, *zip(wide, tensors)]:
        _copy_back(used, target)


def _fused_step_(tensors: Sequence[FallbackTensors], rule: FallbackRule, scaling: GradientScaling) -> None:
    """Call torch's kernel, for which steps have been counted."""
    parameters, gradients, averages, squares, steps = map(list, zip(*tensors))
    lr, weight_decay = rule.lr, rule.weight_decay
    if isinstance(lr, Tensor):
        lr = lr.to(parameters[0].device)
    if isinstance(weight_decay, Tensor):  # the fused kernel takes a number, for which the host would have to wait
        kept = (1 - lr * weight_decay.to(parameters[0].device)).to(parameters[0].dtype)
        torch._foreach_mul_(parameters, kept if scaling.found_inf is None else kept.where(scaling.found_inf == 0, 1))
        weight_decay = 0.0
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
        **scaling._asdict(),
    )
    torch.autograd.graph.increment_version([*parameters, *averages, *squares])


def _promoted(tensors: FallbackTensors) -> FallbackTensors:
    """Return the tensors in float32 at least, those that are in it already as they are."""
    return FallbackTensors(*(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors))


def _is_whole(tensors: FallbackTensors) -> bool:
    """Whether torch's kernel works on the tensors as they are, as on most: contiguous ones, on a CPU whole vectors."""
    parameter, gradient, average, square, _ = tensors
    dense = (
        parameter.is_contiguous() and gradient.is_contiguous() and average.is_contiguous() and square.is_contiguous()
    )
    return dense and (not parameter.is_cpu or parameter.numel() % _VECTOR == 0)


def _as_vectors(tensors: FallbackTensors) -> Iterator[tuple[FallbackTensors, FallbackTensors]]:
    """Yield tensors that torch's kernel can work on, each with the part of `tensors` that they stand for.

    The kernel for CPUs walks all four through memory in the same order and looks at no strides: with a transposed
    gradient it would silently pair the wrong elements. What is left behind the last whole vector is worked on as a
    vector of its own, filled up with zeros: of 70 elements the first 64 are used where they are, the last 6 in a copy.
    """
    *elements, step = tensors
    first = tensors.parameter
    rest = first.numel() % _VECTOR if first.device.type == "cpu" else 0
    dense = first.is_contiguous() or torch.empty_like(first).stride() == first.stride()
    if not (dense and all(t.stride() == first.stride() for t in elements)):
        yield FallbackTensors(*(_padded(t.reshape(-1), rest) for t in elements), step), tensors
    elif not rest:
        yield tensors, tensors
    else:
        flat = [t.as_strided((t.numel(),), (1,)) for t in elements]
        whole = FallbackTensors(*(t[:-rest] for t in flat), step)
        tail = FallbackTensors(*(t[-rest:] for t in flat), step)
        if first.numel() > rest:
            yield whole, whole
        yield FallbackTensors(*(_padded(t, rest) for t in tail[:4]), step), tail


def _padded(flat: Tensor, rest: int) -> Tensor:
    """Return a copy of `flat`, with zeros behind it if its last vector has only `rest` elements."""
    return torch.nn.functional.pad(flat, (0, -rest % _VECTOR)) if rest else flat.clone()


def _copy_back(used: FallbackTensors, target: FallbackTensors) -> None:
    """Copy what the step has written into `target`, unless it was written there."""
    for field in ("parameter", "average", "square"):
        source, place = getattr(used, field), getattr(target, field)
        if place is not source:
            place.copy_(source if source.shape == place.shape else source[: place.numel()].view_as(place))
