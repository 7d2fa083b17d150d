"""NAdamW, for the parameters that are not matrices: AdamW with Nesterov momentum, by torch's fused kernel of AdamW.

With t the count of a parameter's steps and G its gradient:

    P <- P * keep
    M <- beta1 * M + (1 - beta1) * G;  V <- beta2 * V + (1 - beta2) * G**2
    N  = beta1 * M + (1 - beta1) * G
    P <- P - lr / (1 - beta1**t) * N / (sqrt(V) / sqrt(1 - beta2**t) + eps)

where keep is 1 - lr * weight_decay, or as `rules/decay.py` says for other modes. Cautious decay looks at the sign of N.

N is the average that AdamW would get if its average already were the new M. So a step of NAdamW computes M, and AdamW
takes the step with a copy of it, which becomes N.

Source: Choi et al., On empirical comparisons of optimizers for deep learning, arXiv:1910.05446, table 1, with a
constant beta1 and decoupled weight decay, as in timm. `torch.optim.NAdam` has another formula: it schedules beta1.
"""

from __future__ import annotations

import torch

from .adamw import adamw_
from .fallback import FallbackRule, FallbackTensors
from .scaling import UNSCALED, GradientScaling
from .widened import fit_at_once, have_one_dtype, update_widened_


def nadamw_(tensors: FallbackTensors, rule: FallbackRule, scaling: GradientScaling = UNSCALED) -> None:
    """Take one NAdamW step with parameters of one device and dtype; changes `tensors` in place, except the gradients.

    Tensors may have any strides. If gradients overflowed, nothing changes. Each element of parameters and averages is
    rounded as by `adamw_`, an average twice while it becomes N.
    """
    if have_one_dtype(tensors, with_half=False) and fit_at_once(tensors):
        _step_(tensors, rule, scaling)
    else:
        update_widened_(_step_, tensors, rule, scaling)


def _step_(tensors: FallbackTensors, rule: FallbackRule, scaling: GradientScaling) -> None:
    """Take the step with tensors of one dtype; there are copies of averages, and of gradients while they are scaled."""
    gradients, averages = tensors.gradients, tensors.averages
    if scaling.grad_scale is not None:
        gradients = torch._foreach_div(gradients, scaling.grad_scale.reshape(()).to(gradients[0].dtype))
    added = torch._foreach_neg(gradients) if rule.maximize else gradients
    ahead = torch._foreach_lerp(averages, added, 1 - rule.betas[0])
    kept = ahead
    if scaling.found_inf is not None:
        finite = scaling.found_inf.reshape(()) == 0
        kept = [average.where(finite, before) for average, before in zip(ahead, averages)]
    torch._foreach_copy_(averages, kept)
    adamw_(tensors._replace(gradients=gradients, averages=ahead), rule, scaling._replace(grad_scale=None))
