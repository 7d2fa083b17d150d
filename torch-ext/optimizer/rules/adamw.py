"""AdamW, for the parameters that are not matrices, with torch's fused kernel."""

from __future__ import annotations

from functools import partial
from itertools import chain, repeat
from typing import Callable, Iterable, Union

import torch
from torch import Tensor

from .decay import decay_, decay_cautiously_, taken_by_decay
from .fallback import FallbackRule, FallbackTensors, columns_of, runs_of, uncount_overflow_
from .scaling import UNSCALED, GradientScaling
from .short_vectors import update_joined_
from .widened import have_one_dtype, update_widened_

# Elements of parameters that have copies at once for cautious decay; whole vectors of torch's kernel.
CAUTIOUS_AT_ONCE = 1 << 22


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
    else:
        _fused_step_(tensors, rule, scaling)
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
    _fused_step_(FallbackTensors(parameters, gradients, averages, squares, tensors.steps), rule, UNSCALED)
    for kept, results in zip(targets, copies):
        if scaling.found_inf is not None:
            finite = scaling.found_inf.reshape(()) == 0
            results = [torch.where(finite, result, each) for result, each in zip(results, kept)]
        torch._foreach_copy_(kept, results)


def _fused_step_(tensors: FallbackTensors, rule: FallbackRule, scaling: GradientScaling) -> None:
    """Take the step, which has been counted."""
    update = partial(_update_, rule, scaling)
    if all(map(Tensor.is_contiguous, chain(*tensors[:4]))):
        update_joined_(update, tensors)
    else:
        _update_contiguous_(update, tensors)
    torch.autograd.graph.increment_version(tensors.parameters)  # not of the state, which is in no graph of autograd


def _update_contiguous_(update: Callable[[FallbackTensors], None], tensors: FallbackTensors) -> None:
    """Apply `update` to flat views or copies of the tensors that are not contiguous."""
    kept = columns_of(map(_in_order_of_memory, zip(*tensors)))
    used = FallbackTensors(*(list(map(Tensor.contiguous, column)) for column in kept))
    update_joined_(update, used)
    places, results = (chain(each.parameters, each.averages, each.squares) for each in (kept, used))
    for place, result in zip(places, results):
        if result is not place:
            place.copy_(result)


def _in_order_of_memory(row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return flat views of a row's tensors, if all four fill their memory in one order; else `row`.

    torch's kernel for CPUs walks through the memory of all four in the same order and ignores strides: with a
    transposed gradient it would silently pair the wrong elements.
    """
    *elements, step = row
    dense = torch.empty_like(elements[0]).stride()
    if any(t.stride() != dense for t in elements):
        return row
    return (*(t.as_strided((t.numel(),), (1,)) for t in elements), step)


def _update_(rule: FallbackRule, scaling: GradientScaling, tensors: FallbackTensors) -> None:
    """Call torch's kernel with contiguous tensors, and apply the decay that it does not know."""
    if _decays_in_kernel(rule):
        _call_kernel_(tensors, rule, scaling)
        return
    taken, rest = taken_by_decay(rule, tensors.parameters[0]), rule._replace(weight_decay=0.0)
    if rule.decay_mode != "cautious":
        decay_(tensors.parameters, taken, scaling.found_inf)
        _call_kernel_(tensors, rest, scaling)
        return
    for run in runs_of(chain.from_iterable(map(_pieces, zip(*tensors))), CAUTIOUS_AT_ONCE):
        part = columns_of(run)
        before = list(map(Tensor.clone, part.parameters))
        _call_kernel_(part, rest, scaling)
        # The average and the update have one sign.
        decay_cautiously_(part.parameters, before, part.averages, taken, scaling.found_inf)


def _pieces(row: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, ...]]:
    """Return contiguous tensors of a parameter in flat pieces of at most CAUTIOUS_AT_ONCE elements."""
    if row[0].numel() <= CAUTIOUS_AT_ONCE:
        return [row]
    *elements, step = row
    return zip(*(t.view(-1).split(CAUTIOUS_AT_ONCE) for t in elements), repeat(step))


def _call_kernel_(tensors: FallbackTensors, rule: FallbackRule, scaling: GradientScaling) -> None:
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
