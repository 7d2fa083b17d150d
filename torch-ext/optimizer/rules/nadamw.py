"""NAdamW, for the parameters that are not matrices: AdamW with Nesterov momentum.

With t the count of a parameter's steps and G its gradient:

    P <- P * keep
    M <- beta1 * M + (1 - beta1) * G;  V <- beta2 * V + (1 - beta2) * G**2
    N  = beta1 * M + (1 - beta1) * G
    P <- P - lr / (1 - beta1**t) * N / (sqrt(V) / sqrt(1 - beta2**t) + eps)

where keep is 1 - lr * weight_decay, or as `rules/decay.py` says for other modes. Cautious decay looks at the sign of N.

Source: Choi et al., On empirical comparisons of optimizers for deep learning, arXiv:1910.05446, table 1, with a
constant beta1 and decoupled weight decay, as in timm. `torch.optim.NAdam` has another formula: it schedules beta1.
"""

from __future__ import annotations

import math
from typing import Sequence

import torch
from torch import Tensor

from ..kernels.formats import exact_dtype
from .decay import decay_, decay_cautiously_, on_device, taken_by_decay
from .fallback import FallbackRule, FallbackTensors, uncount_overflow_
from .scaling import UNSCALED, GradientScaling
from .widened import have_one_dtype, update_widened_


def nadamw_(tensors: FallbackTensors, rule: FallbackRule, scaling: GradientScaling = UNSCALED) -> None:
    """Take one NAdamW step with parameters of one device and dtype; changes `tensors` in place, except the gradients.

    Tensors may have any strides. The host reads no values back from a GPU. Half precision is computed in float32, and
    each element of parameters and averages is rounded once. If gradients overflowed, nothing changes.
    """
    if not have_one_dtype(tensors, with_half=False):
        update_widened_(nadamw_, tensors, rule, scaling)
        return
    parameters, gradients, averages, squares, steps = tensors
    stored = [parameters, averages, squares]
    overflow = None if scaling.found_inf is None else scaling.found_inf.reshape(())
    # If gradients may have overflowed, copies are updated, and taken over only if they have not.
    used = stored if overflow is None else [list(map(Tensor.clone, column)) for column in stored]
    if scaling.grad_scale is not None:
        gradients = torch._foreach_div(gradients, scaling.grad_scale.reshape(()).to(parameters[0].dtype))
    if rule.maximize:
        gradients = torch._foreach_neg(gradients)
    torch._foreach_add_(steps, 1)
    _update_(used, gradients, steps, rule)
    for targets, results in zip(stored, used) if overflow is not None else ():
        torch._foreach_copy_(targets, [result.where(overflow == 0, t) for t, result in zip(targets, results)])
    uncount_overflow_(steps, overflow)


def _update_(used: list[list[Tensor]], gradients: Sequence[Tensor], steps: list[Tensor], rule: FallbackRule) -> None:
    """Update parameters and averages in `used`, in place; `steps` have counted this step."""
    parameters, averages, squares = used
    beta1, beta2 = rule.betas
    device, dtype = parameters[0].device, parameters[0].dtype
    exact = exact_dtype(device)
    count = torch.cat([step.reshape(1) for step in steps]).to(device, exact)  # a file may have counts with a dimension
    lr = on_device(rule.lr, device) if isinstance(rule.lr, Tensor) else rule.lr
    step_sizes = (-lr / bias_correction(beta1, count)).to(dtype).unbind()
    corrections = bias_correction(beta2, count).sqrt().to(dtype).unbind()
    torch._foreach_lerp_(averages, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    ahead = torch._foreach_lerp(averages, gradients, 1 - beta1)
    taken = taken_by_decay(rule, parameters[0])
    if rule.decay_mode == "cautious":
        decay_cautiously_(parameters, parameters, ahead, taken)
    else:
        decay_(parameters, taken, None)
    torch._foreach_mul_(ahead, step_sizes)
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(denominators, corrections)
    torch._foreach_add_(denominators, rule.eps)
    torch._foreach_addcdiv_(parameters, ahead, denominators)


def bias_correction(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta**count of counts from 1 on. float32 would keep four digits of 1 - 0.999, so it is expm1 there."""
    if count.dtype == torch.float64:
        return 1 - beta**count
    return -torch.expm1(count * (math.log(beta) if beta else -math.inf))
