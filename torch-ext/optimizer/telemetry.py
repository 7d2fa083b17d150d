"""What a step saw, kept as tensors on the device until somebody asks."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from .distributed.placement import local_part
from .parameters import UNSCALED, GradientScaling
from .rules.descent import DescentRule

Group = Mapping[str, Any]
Number = Union[float, Tensor]


class SeenBatch(NamedTuple):
    """One batch of a step: the Frobenius norms (B,) of its polar factors, and how they went into the parameters."""

    norms: Tensor
    elements: int
    rule: DescentRule


class SeenGroup(NamedTuple):
    """One group of the fallback: those of its parameters that a step has updated, and the learning rate of it."""

    group: Group
    parameters: list[Tensor]
    lr: Number


class Seen(NamedTuple):
    """One step; `scaling` is GradScaler's word of it."""

    batches: list[SeenBatch]
    groups: list[SeenGroup]
    scaling: GradientScaling


NOTHING = Seen([], [], UNSCALED)


def as_it_is(value: Number) -> Number:
    """Return a number that stays: tensors are changed where they are, by schedulers and scalers."""
    return value.clone() if isinstance(value, Tensor) else value


def seen_scaling(scalings: Iterable[GradientScaling]) -> GradientScaling:
    """Return a scaling that stays; it has overflowed if it has for any of the ranks that share parameters."""
    grad_scale, overflows = None, []
    for scaling in scalings:
        grad_scale = scaling.grad_scale
        overflows += [] if scaling.found_inf is None else [scaling.found_inf.reshape(())]
    return GradientScaling(as_it_is(grad_scale), torch.stack(overflows).amax() if overflows else None)


def update_metrics(seen: Sequence[SeenBatch]) -> dict[str, Tensor]:
    """Return norm and root mean square of a step's updates of matrices, how many there were, and how many not finite.

    0-d tensors on the device of the batches; weight decay is no part of an update.
    """
    if not seen:
        names = "matrices", "matrices_not_finite", "muon_update_norm", "muon_update_rms"
        return {name: torch.zeros((), dtype=torch.float64 if "update" in name else torch.int64) for name in names}
    device = seen[0].norms.device
    norms = [batch.norms * (batch.rule.multiplier * batch.rule.lr.to(batch.norms.device)) for batch in seen]
    total = torch.stack([norm.double().square().sum().to(device) for norm in norms]).sum().sqrt()
    finite = torch.cat([batch.norms.isfinite().to(device) for batch in seen])
    return {
        "matrices": torch.tensor(finite.numel()),
        "matrices_not_finite": (~finite).sum(),
        "muon_update_norm": total,
        "muon_update_rms": total / sum(batch.elements for batch in seen) ** 0.5,
    }


def gradient_norms(groups: Iterable[Group], grad_scale: Optional[Tensor]) -> dict[str, Tensor]:
    """Return the Frobenius norms of the gradients that are there, of matrices and of the rest; 0-d.

    Of a sharded one it is this rank's part. Gradients are divided by `grad_scale`.
    """
    gradients: dict[str, list[Tensor]] = {"muon_gradient_norm": [], "fallback_gradient_norm": []}
    for group in groups:
        own = gradients["muon_gradient_norm" if group["use_muon"] else "fallback_gradient_norm"]
        parts = [local_part(p.grad) for p in group["params"] if p.grad is not None]
        own += [part for part in parts if part.numel()]
    norms = {key: _norm(tensors) for key, tensors in gradients.items()}
    return norms if grad_scale is None else {key: norm / grad_scale.to(norm.device) for key, norm in norms.items()}


def fallback_update_norm(seen: Seen, state: Mapping[Tensor, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the Frobenius norm of a step's updates of what is no matrix, as the state of now tells it; 0-d float64.

    Weight decay is no part of an update. NAdamW's needs the gradients: it is NaN where they are gone.
    """
    there = [(p, own) for own in seen.groups for p in own.parameters if p in state]
    updates = [_adamw_update(p, state[p], own, seen.scaling) for p, own in there]
    norm = _norm([update for update in updates if update.numel()]).double()
    overflow = seen.scaling.found_inf
    return {"fallback_update_norm": norm if overflow is None else norm.where(overflow.to(norm.device) == 0, 0)}


def _adamw_update(p: Tensor, state: Mapping[str, Tensor], seen: SeenGroup, scaling: GradientScaling) -> Tensor:
    beta1, beta2 = seen.group["adamw_betas"]
    average, square, count = (
        local_part(state[key]).to(p.device, torch.float64) for key in ("exp_avg", "exp_avg_sq", "step")
    )
    if seen.group["fallback"] == "nadamw":
        gradient = torch.full_like(average, torch.nan) if p.grad is None else local_part(p.grad).double()
        gradient = gradient if scaling.grad_scale is None else gradient / scaling.grad_scale
        average = average.lerp(-gradient if seen.group["maximize"] else gradient, 1 - beta1)
    denominator = (square / (1 - beta2**count)).sqrt() + seen.group["adamw_eps"]
    return seen.lr / (1 - beta1**count) * average / denominator


def _norm(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros(())
    norms = [n.double() for n in torch._foreach_norm(tensors)]
    return torch.stack([n.to(norms[0].device) for n in norms]).norm()
