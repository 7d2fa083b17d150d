"""Weight decay: the factor `keep` by which a step multiplies a parameter, for every rule.

    decoupled    keep = 1 - lr * weight_decay
    corrected    keep = 1 - lr * (lr / decay_lr) * weight_decay
    independent  keep = 1 - weight_decay, and 1 where lr is 0
    cautious     keep = 1 - lr * weight_decay where parameter and update have the same sign, else 1

In cautious mode decay acts only where the update also moves the parameter towards zero.

Sources: Loshchilov, Hutter, Decoupled weight decay regularization, arXiv:1711.05101 (decoupled as torch has it,
independent as in the paper); Defazio, Why gradients rapidly increase near the end of training, arXiv:2506.02285 (AdamC,
where `decay_lr` is the largest learning rate of the schedule); Chen et al., Cautious weight decay, arXiv:2510.12402.
"""

from __future__ import annotations

from typing import Optional, Sequence, Union

import torch
from torch import Tensor

from ..kernels.formats import exact_dtype
from ..kernels.host_copy import moved
from ..kernels.portable.arithmetic import have_one_sign
from .fallback import FallbackRule

Number = Union[float, Tensor]

# The compiled descent numbers the first three in this order.
DECAY_MODES = ("decoupled", "independent", "cautious", "corrected")


def scaled_decay(mode: str, lr: Number, weight_decay: Number, decay_lr: Optional[float]) -> Number:
    """Return the weight decay of one step.

    For `corrected` it includes lr / decay_lr; for `independent` it is 0 where lr is 0. Raises ValueError if `corrected`
    has no `decay_lr`.
    """
    if mode == "independent":
        # Checkpoint tools create state by a step with lr 0, which must leave parameters as they are.
        return _product((lr != 0).to(exact_dtype(lr.device)) if isinstance(lr, Tensor) else lr != 0, weight_decay)
    if mode != "corrected":
        return weight_decay
    if decay_lr is None:
        raise ValueError(
            "decay_mode='corrected' scales by lr / decay_lr: a group that gets this mode after construction needs a "
            "decay_lr, the largest lr of its schedule"
        )
    share = lr.to(exact_dtype(lr.device)) / decay_lr if isinstance(lr, Tensor) else lr / decay_lr
    return _product(share, weight_decay)


def _product(share: Number, weight_decay: Number) -> Number:
    """Return the product: of two tensors, of which one may be on the CPU, in a dtype that both devices have."""
    if isinstance(share, Tensor) and isinstance(weight_decay, Tensor):
        exact = exact_dtype(share.device, exact_dtype(weight_decay.device))
        share, weight_decay = (each.reshape(()).to(exact) for each in (share, weight_decay))
    return share * weight_decay


def on_device(value: Number, device: torch.device) -> Tensor:
    """Return a number as a 0-d tensor on a device, in its `exact_dtype`, without making the host wait."""
    # Filled on the device: a copy from the CPU would wait for it, and cannot be captured in a graph.
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=exact_dtype(device), device=device)
    return moved(value.reshape(()), device, exact_dtype(device))


def taken_by_decay(rule: FallbackRule, like: Tensor) -> Tensor:
    """Return the share of a parameter that decay removes, as `on_device` for the device of `like`."""
    share = on_device(rule.weight_decay, like.device)
    return share if rule.decay_mode == "independent" else on_device(rule.lr, like.device) * share


def decay_(parameters: Sequence[Tensor], taken: Tensor, found_inf: Optional[Tensor]) -> None:
    """Multiply `parameters` of one dtype, in place, by 1 - `taken`, or by 1 if gradients overflowed.

    `found_inf` has one element, in any shape.
    """
    kept = (1 - taken).to(parameters[0].dtype)
    torch._foreach_mul_(parameters, kept if found_inf is None else kept.where(found_inf.reshape(()) == 0, 1))


def decay_cautiously_(
    parameters: Sequence[Tensor],
    before: Sequence[Tensor],
    updates: Sequence[Tensor],
    taken: Tensor,
    found_inf: Optional[Tensor] = None,
) -> None:
    """Subtract `taken` * `before` from `parameters` of one dtype, in place, where decay and update agree.

    They agree where `before` and the update, which is subtracted, have the same sign. Product and difference are
    separate operations: a compiler might fuse them for some shards only, which would give other bits there.
    """
    taken = taken.to(parameters[0].dtype)
    for parameter, old, update in zip(parameters, before, updates):
        agree = have_one_sign(old, update)
        agree = agree if found_inf is None else agree & (found_inf.reshape(()) == 0)
        parameter.sub_((old * taken).masked_fill_(~agree, 0))
