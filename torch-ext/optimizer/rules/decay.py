"""Weight decay: what a step leaves of a parameter besides its update, for every rule.

    decoupled    keep = 1 - lr * weight_decay
    corrected    keep = 1 - lr * (lr / decay_lr) * weight_decay
    independent  keep = 1 - weight_decay, and 1 where lr is 0
    cautious     keep = 1 - lr * weight_decay where parameter and update have one sign, so that both shrink it; else 1

Sources: Loshchilov, Hutter, Decoupled weight decay regularization, arXiv:1711.05101: the first as torch has it, the
third as the paper does; Defazio, Why gradients rapidly increase near the end of training, arXiv:2506.02285 (AdamC),
where `decay_lr` is the largest learning rate of the schedule; Chen et al., Cautious weight decay, arXiv:2510.12402.
"""

from __future__ import annotations

from typing import Optional, Sequence, Union

import torch
from torch import Tensor

from .fallback import FallbackRule

Number = Union[float, Tensor]

# The first three in the order in which the compiled descent numbers them.
DECAY_MODES = ("decoupled", "independent", "cautious", "corrected")


def scaled_decay(mode: str, lr: Number, weight_decay: Number, decay_lr: Optional[float]) -> Number:
    """Return the weight decay of one step: what `corrected` makes of it is decoupled decay from here on.

    Raises ValueError where `corrected` has no `decay_lr`.
    """
    if mode == "independent":
        # A step with lr 0, by which checkpoint tools have state made, is to leave parameters as they are.
        return weight_decay * ((lr != 0).double() if isinstance(lr, Tensor) else lr != 0)
    if mode != "corrected":
        return weight_decay
    if decay_lr is None:
        raise ValueError(
            "decay_mode='corrected' scales by lr / decay_lr: a group that gets this mode after it was made needs a "
            "decay_lr, the largest lr of its schedule"
        )
    share = lr.double() / decay_lr if isinstance(lr, Tensor) else lr / decay_lr
    if isinstance(share, Tensor) and isinstance(weight_decay, Tensor):
        share = share.to(weight_decay.device)
    return share * weight_decay


def on_device(value: Number, device: torch.device) -> Tensor:
    """Return a number as a float64 0-d tensor on a device, for which the host does not wait."""
    # A number is written by a kernel there: a copy from the CPU would wait, and cannot be captured in a graph.
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=torch.float64, device=device)
    return value.reshape(()).to(device, torch.float64)


def taken_by_decay(rule: FallbackRule, like: Tensor) -> Tensor:
    """Return the share of a parameter that decay takes: float64, 0-d, on the device of `like`."""
    share = on_device(rule.weight_decay, like.device)
    return share if rule.decay_mode == "independent" else on_device(rule.lr, like.device) * share


def decay_(parameters: Sequence[Tensor], taken: Tensor, found_inf: Optional[Tensor]) -> None:
    """Multiply `parameters` of one dtype, in place, by what is kept; by 1 where gradients overflowed.

    `found_inf` has one element, and any shape.
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
    """Take from `parameters` of one dtype, in place, their share `taken` of what they were `before` the update.

    It is taken where `before` and the update that is subtracted have one sign. Product and difference are operations by
    themselves: one that a compiler fuses at some places alone would have other bits on shards.
    """
    taken = taken.to(parameters[0].dtype)
    for parameter, old, update in zip(parameters, before, updates):
        agree = ((old > 0) & (update > 0)) | ((old < 0) & (update < 0))
        agree = agree if found_inf is None else agree & (found_inf.reshape(()) == 0)
        parameter.sub_((old * taken).masked_fill_(~agree, 0))
