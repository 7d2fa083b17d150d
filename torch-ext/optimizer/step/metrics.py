"""Metrics of the last step, 0-d tensors on the device; only reading one waits for it."""

from __future__ import annotations

from typing import Iterable, Optional, Sequence

import torch
from torch import Tensor

from ..parameters.settings import Group
from ..plan.layout import local_part
from .batch import UpdateNorms


def update_metrics(updates: Sequence[UpdateNorms]) -> dict[str, Tensor]:
    """Return norm and root mean square of a step's updates of matrices, how many there were, and how many not finite.

    0-d tensors on the device of the batches; weight decay is not part of an update.
    """
    if not updates:
        names = "matrices", "matrices_not_finite", "muon_update_norm", "muon_update_rms"
        return {name: torch.zeros((), dtype=torch.float64 if "update" in name else torch.int64) for name in names}
    device = updates[0].norms.device
    norms = [u.norms * (u.multiplier * u.lr).to(u.norms.device) for u in updates]
    total = torch.stack([norm.double().square().sum().to(device) for norm in norms]).sum().sqrt()
    finite = torch.cat([update.norms.isfinite().to(device) for update in updates])
    return {
        "matrices": torch.tensor(finite.numel()),
        "matrices_not_finite": (~finite).sum(),
        "muon_update_norm": total,
        "muon_update_rms": total / sum(update.elements for update in updates) ** 0.5,
    }


def gradient_norms(groups: Iterable[Group], grad_scale: Optional[Tensor]) -> dict[str, Tensor]:
    """Return the Frobenius norms of the gradients that are there, of matrices and of the rest; 0-d.

    Of a sharded one it is this rank's part. Gradients are divided by `grad_scale`.
    """
    gradients: dict[str, list[Tensor]] = {"muon_gradient_norm": [], "fallback_gradient_norm": []}
    for group in groups:
        parts = [local_part(p.grad) for p in group["params"] if p.grad is not None]
        branch = "muon_gradient_norm" if group["use_muon"] else "fallback_gradient_norm"
        gradients[branch] += [part for part in parts if part.numel()]
    norms = {key: _norm(tensors) for key, tensors in gradients.items()}
    return norms if grad_scale is None else {key: norm / grad_scale.to(norm.device) for key, norm in norms.items()}


def _norm(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = [n.double() for n in torch._foreach_norm(tensors)]
    return torch.stack([n.to(norms[0].device) for n in norms]).norm()
