"""What a step saw, kept as tensors on the device until somebody asks."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from .rules.descent import DescentRule


class Seen(NamedTuple):
    """One batch of a step: the Frobenius norms (B,) of its polar factors, and what they were multiplied with."""

    norms: Tensor
    elements: int
    multiplier: float
    rule: DescentRule


def update_metrics(seen: Sequence[Seen]) -> dict[str, Tensor]:
    """Return norm and root mean square of a step's updates of matrices, how many there were, and how many not finite.

    0-d tensors on the device of the batches; weight decay is no part of an update.
    """
    if not seen:
        return {"matrices": torch.zeros((), dtype=torch.int64)}
    device = seen[0].norms.device
    norms = [batch.norms * (batch.multiplier * batch.rule.lr.to(batch.norms.device)) for batch in seen]
    total = torch.stack([norm.double().square().sum().to(device) for norm in norms]).sum().sqrt()
    finite = torch.cat([batch.norms.isfinite().to(device) for batch in seen])
    return {
        "matrices": torch.tensor(finite.numel()),
        "matrices_not_finite": (~finite).sum(),
        "muon_update_norm": total,
        "muon_update_rms": total / sum(batch.elements for batch in seen) ** 0.5,
    }


def gradient_norms(groups: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the Frobenius norms of the gradients that are there, of matrices and of the rest; 0-d."""
    gradients: dict[str, list[Tensor]] = {"muon_gradient_norm": [], "fallback_gradient_norm": []}
    for group in groups:
        own = gradients["muon_gradient_norm" if group["use_muon"] else "fallback_gradient_norm"]
        own += [p.grad for p in group["params"] if p.grad is not None and p.grad.numel()]
    return {key: _norm(tensors) for key, tensors in gradients.items()}


def _norm(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros(())
    norms = [n.double() for n in torch._foreach_norm(tensors)]
    return torch.stack([n.to(norms[0].device) for n in norms]).norm()
