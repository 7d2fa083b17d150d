"""AdamW for the parameters that are not matrices, by torch's own fused kernel."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from .fallback import FallbackRule, FallbackState, uncount_overflow_
from .scaling import UNSCALED, GradientScaling

# Elements of the longest vector that torch's fused kernel works on: 64 bytes of half precision. On a CPU the kernel
# rounds what is left behind the last whole vector differently, so bits would depend on where a parameter is sharded.
_VECTOR = 32


class Operands(NamedTuple):
    """The four tensors of one parameter that an AdamW step reads; all but the gradient are written."""

    parameter: Tensor
    gradient: Tensor
    average: Tensor
    square: Tensor


def adamw_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[FallbackState],
    rule: FallbackRule,
    scaling: GradientScaling = UNSCALED,
) -> None:
    """Take one AdamW step with `parameters`, of one device and dtype, and their `states`, both in place.

    Gradients are not changed; tensors may have any strides. Gradients that overflowed change nothing. Each element of
    parameters and averages is rounded once, except for float32 and float64 parameters whose weight decay is a tensor.
    An element gets the same bits in a whole parameter and in any part of it.
    Source: Loshchilov, Hutter, Decoupled weight decay regularization, arXiv:1711.05101, algorithm 2.
    """
    stored = [Operands(p, g, s.average, s.square) for p, g, s in zip(parameters, gradients, states)]
    # A decay that is a tensor is a pass by itself, in which half precision would lose it.
    wide = [_promoted(operands) for operands in stored] if isinstance(rule.weight_decay, Tensor) else stored
    pieces = [
        (used, target, state.step) for operands, state in zip(wide, states) for used, target in _as_vectors(operands)
    ]
    used = [operands for operands, _, _ in pieces]
    _fused_step_(used, [step for _, _, step in pieces], [state.step for state in states], rule, scaling)
    for operands, target, _ in pieces:
        _copy_back(operands, target)
    for operands, target in zip(wide, stored):
        _copy_back(operands, target)


def _fused_step_(
    used: Sequence[Operands],
    counts: list[Tensor],
    steps: list[Tensor],
    rule: FallbackRule,
    scaling: GradientScaling,
) -> None:
    """Call torch's kernel; `counts` has for each of `used` its parameter's entry of `steps`, which go up by one."""
    parameters, gradients, averages, squares = map(list, zip(*used))
    lr, weight_decay = rule.lr, rule.weight_decay
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
        counts,
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


def _promoted(operands: Operands) -> Operands:
    """Return the tensors in float32 at least; those that are in it already are the same tensors."""
    return Operands(*(t.to(torch.promote_types(t.dtype, torch.float32)) for t in operands))


def _as_vectors(operands: Operands) -> Iterator[tuple[Operands, Operands]]:
    """Yield tensors that torch's kernel can work on, each with the part of `operands` that they stand for.

    The kernel for CPUs walks all four through memory in the same order and looks at no strides: with a transposed
    gradient it would silently pair the wrong elements. What is left behind the last whole vector is worked on as a
    vector of its own, filled up with zeros: of 70 elements the first 64 are used where they are, the last 6 in a copy.
    """
    first = operands.parameter
    rest = first.numel() % _VECTOR if first.device.type == "cpu" else 0
    dense = first.is_contiguous() or torch.empty_like(first).stride() == first.stride()
    if not (dense and all(t.stride() == first.stride() for t in operands)):
        yield Operands(*(_padded(t.reshape(-1), rest) for t in operands)), operands
        return
    if not rest:
        yield operands, operands
        return
    flat = [t.as_strided((t.numel(),), (1,)) for t in operands]
    whole, tail = Operands(*(t[:-rest] for t in flat)), Operands(*(t[-rest:] for t in flat))
    if first.numel() > rest:
        yield whole, whole
    yield Operands(*(_padded(t, rest) for t in tail)), tail


def _padded(flat: Tensor, rest: int) -> Tensor:
    """Return a copy of `flat`, with zeros behind it if its last vector has only `rest` elements."""
    return torch.nn.functional.pad(flat, (0, -rest % _VECTOR)) if rest else flat.clone()


def _copy_back(used: Operands, target: Operands) -> None:
    """Copy what the step has written into `target`, unless it was written there."""
    for source, place in (
        (used.parameter, target.parameter),
        (used.average, target.average),
        (used.square, target.square),
    ):
        if place is not source:
            place.copy_(source if source.shape == place.shape else source[: place.numel()].view_as(place))
