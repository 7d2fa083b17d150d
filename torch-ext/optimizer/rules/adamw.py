"""AdamW, for the parameters that are not matrices, with torch's fused kernel."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from typing import Iterator, NamedTuple, Sequence, Union

import torch
from torch import Tensor

from .decay import decay_, decay_cautiously_, taken_by_decay
from .fallback import FallbackRule, FallbackTensors, columns_of, uncount_overflow_
from .scaling import UNSCALED, GradientScaling
from .short_vectors import update_joined_
from .widened import have_one_dtype, update_widened_

# Elements of the longest vector that torch's fused CPU kernel uses: 64 bytes of half precision. The kernel rounds the
# elements after the last whole vector differently, so the bits would depend on how a parameter is sharded.
_VECTOR = 32


class _Entry(NamedTuple):
    """The `FallbackTensors` of one parameter, or of a part of it."""

    parameter: Tensor
    gradient: Tensor
    average: Tensor
    square: Tensor
    step: Tensor


def adamw_(tensors: FallbackTensors, rule: FallbackRule, scaling: GradientScaling = UNSCALED) -> None:
    """Take one AdamW step with parameters of one device and dtype; changes `tensors` in place, except the gradients.

    Tensors may have any strides. If gradients overflowed, nothing changes. Each element of parameters and averages is
    rounded once; float32 and float64 parameters are rounded once more if weight decay is a separate pass. An element
    gets the same bits in a whole parameter and in any part of it.
    Source: Loshchilov, Hutter, Decoupled weight decay regularization, arXiv:1711.05101, algorithm 2.
    """
    if not have_one_dtype(tensors, with_half=_decays_in_kernel(rule)):
        update_widened_(adamw_, tensors, rule, scaling)
        return
    torch._foreach_add_(tensors.steps, 1)
    if _ignores(scaling, tensors.parameters[0].device):
        _step_in_copies_(tensors, rule, scaling)
    elif _are_whole(*tensors[:4]) and _decays_in_kernel(rule):
        _fused_step_(tensors, rule, scaling)
    else:
        _step_in_pieces_(tensors, rule, scaling)
    uncount_overflow_(tensors.steps, scaling.found_inf)


def _decays_in_kernel(rule: FallbackRule) -> bool:
    """Whether torch's kernel applies the decay. Else it is a separate pass, for which half precision is widened."""
    return rule.decay_mode in ("decoupled", "corrected") and not isinstance(rule.weight_decay, Tensor)


def _ignores(scaling: GradientScaling, device: torch.device) -> bool:
    """Whether torch's kernel would ignore `scaling`: on Apple's GPUs it takes these arguments without effect."""
    return device.type == "mps" and (scaling.grad_scale is not None or scaling.found_inf is not None)


def _step_in_copies_(tensors: FallbackTensors, rule: FallbackRule, scaling: GradientScaling) -> None:
    """Take the step with unscaled gradients in copies, whose values are taken over unless gradients overflowed."""
    gradients, targets = tensors.gradients, [tensors.parameters, tensors.averages, tensors.squares]
    if scaling.grad_scale is not None:
        gradients = torch._foreach_div(gradients, scaling.grad_scale.reshape(()))
    parameters, averages, squares = copies = [list(map(Tensor.clone, each)) for each in targets]
    _step_in_pieces_(FallbackTensors(parameters, gradients, averages, squares, tensors.steps), rule, UNSCALED)
    for kept, results in zip(targets, copies):
        if scaling.found_inf is not None:
            finite = scaling.found_inf.reshape(()) == 0
            results = [torch.where(finite, result, each) for result, each in zip(results, kept)]
        torch._foreach_copy_(kept, results)


def _step_in_pieces_(tensors: FallbackTensors, rule: FallbackRule, scaling: GradientScaling) -> None:
    """Take the step with copies, or flat views, of the tensors that torch's kernel cannot work on directly."""
    pieces = [pair for entry in map(_Entry, *tensors) for pair in _as_vectors(entry)]
    _fused_step_(columns_of(used for used, _ in pieces), rule, scaling)
    for used, target in pieces:
        _copy_back(used, target)


def _fused_step_(tensors: FallbackTensors, rule: FallbackRule, scaling: GradientScaling) -> None:
    """Call torch's kernel, for which steps have already been counted, and apply the decay that it does not know."""
    parameters, averages = tensors.parameters, tensors.averages
    if _decays_in_kernel(rule):
        _call_kernel_(tensors, rule, scaling)
        return
    taken, rest = taken_by_decay(rule, parameters[0]), rule._replace(weight_decay=0.0)
    if rule.decay_mode == "cautious":
        before = list(map(Tensor.clone, parameters))
        _call_kernel_(tensors, rest, scaling)
        decay_cautiously_(parameters, before, averages, taken, scaling.found_inf)  # average and update have one sign
    else:
        decay_(parameters, taken, scaling.found_inf)
        _call_kernel_(tensors, rest, scaling)


def _call_kernel_(tensors: FallbackTensors, rule: FallbackRule, scaling: GradientScaling) -> None:
    update_joined_(partial(_call_directly_, rule, scaling), tensors)
    torch.autograd.graph.increment_version(tensors.parameters)  # not of the state, which is in no graph of autograd


def _call_directly_(rule: FallbackRule, scaling: GradientScaling, tensors: FallbackTensors) -> None:
    parameters, gradients, averages, squares, steps = tensors
    torch._fused_adamw_(
        parameters,
        # With a scale the kernel writes the unscaled gradients back into this argument.
        gradients if scaling.grad_scale is None else [g.clone() for g in gradients],
        averages,
        squares,
        [],
        steps,
        lr=_as_kernels_take_it(rule.lr, parameters[0].device),
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        amsgrad=False,
        maximize=rule.maximize,
        grad_scale=scaling.grad_scale,
        found_inf=scaling.found_inf,
    )


def _as_kernels_take_it(lr: Union[float, Tensor], device: torch.device) -> Union[float, Tensor]:
    """Return a number or a tensor on the CPU as it is; another tensor on `device`, in float32 unless that is a CPU."""
    if not isinstance(lr, Tensor) or lr.is_cpu:
        return lr
    return lr.to(device, lr.dtype if device.type == "cpu" else torch.float32)


def _are_whole(parameters: Sequence[Tensor], *others: Sequence[Tensor]) -> bool:
    """Whether torch's kernel can work on the tensors directly: they are contiguous and, on a CPU, whole vectors."""
    in_vectors = not parameters[0].is_cpu or math.gcd(_VECTOR, *map(Tensor.numel, parameters)) == _VECTOR
    return in_vectors and all(map(Tensor.is_contiguous, chain(parameters, *others)))


def _as_vectors(entry: _Entry) -> Iterator[tuple[_Entry, _Entry]]:
    """Yield tensors that torch's kernel can work on, each with the part of `entry` that they stand for.

    The CPU kernel walks through the memory of all four tensors in the same order and ignores strides: with a transposed
    gradient it would silently pair the wrong elements. Elements after the last whole vector are copied into a vector
    that is padded with zeros. Of 70 elements the first 64 are used in place, the last 6 in such a copy.
    """
    *elements, step = entry
    if _are_whole(*([t] for t in elements)):
        yield entry, entry
        return
    first = entry.parameter
    rest = first.numel() % _VECTOR if first.device.type == "cpu" else 0
    dense = first.is_contiguous() or torch.empty_like(first).stride() == first.stride()
    if not (dense and all(t.stride() == first.stride() for t in elements)):
        yield _Entry(*(_padded(t.reshape(-1), rest) for t in elements), step), entry
        return
    flat, length = [t.as_strided((t.numel(),), (1,)) for t in elements], first.numel() - rest
    if length:
        whole = _Entry(*(t[:length] for t in flat), step)
        yield whole, whole
    if rest:
        tail = _Entry(*(t[length:] for t in flat), step)
        yield _Entry(*(_padded(t, rest) for t in tail[:4]), step), tail


def _padded(flat: Tensor, rest: int) -> Tensor:
    """Return a copy of `flat`. If its last vector has only `rest` elements, zeros follow up to a whole vector."""
    return torch.nn.functional.pad(flat, (0, -rest % _VECTOR)) if rest else flat.clone()


def _copy_back(used: _Entry, target: _Entry) -> None:
    """Copy the results of the step into `target`, unless the step has written them there."""
    for field in ("parameter", "average", "square"):
        source, place = getattr(used, field), getattr(target, field)
        if place is not source:
            place.copy_(source if source.shape == place.shape else source[: place.numel()].view_as(place))
