"""Metrics of the last step, 0-d tensors on the device; only reading one waits for it."""

from __future__ import annotations

from typing import Iterable, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.formats import exact_dtype
from ..kernels.host_copy import moved
from ..parameters.settings import Group
from ..plan.layout import local_part
from .finish import UpdateNorms


def update_metrics(updates: Sequence[UpdateNorms]) -> dict[str, Tensor]:
    """Return norm and root mean square of a step's updates of matrices, how many there were, and how many not finite.

    0-d tensors on the device of the batches; weight decay is not part of an update. Matrices without a gradient do not
    count. `matrices` is on the CPU if the count depends on no other rank.
    """
    if not updates:
        names = {"matrices": torch.int64, "matrices_not_finite": torch.int64}
        names |= dict.fromkeys(("muon_update_norm", "muon_update_rms"), torch.float64)
        return {name: torch.zeros((), dtype=dtype, device="cpu") for name, dtype in names.items()}
    device = updates[0].norms.device
    norms = [u.applied * _step_size(u) for u in updates]
    squares = [norm.to(exact_dtype(norm.device)).square().sum() for norm in norms]
    total = torch.stack([each.to(device, exact_dtype(device)) for each in squares]).sum().sqrt()
    finite = torch.cat([update.applied.isfinite().to(device) for update in updates])
    counts = [len(u.norms) if u.active is None else u.active.sum().to(device) for u in updates]
    matrices, elements = sum(counts), sum(count * u.elements for count, u in zip(counts, updates))
    if not isinstance(matrices, Tensor):  # not on a GPU, to which a number would have to be copied
        matrices, elements = (torch.tensor(number, device="cpu") for number in (matrices, elements))
    return {
        "matrices": matrices,
        "matrices_not_finite": (~finite).sum(),
        "muon_update_norm": total,
        "muon_update_rms": total / elements.to(total.dtype).clamp(min=1).sqrt(),
    }


def _step_size(update: UpdateNorms) -> Tensor:
    """Return multiplier times lr: 0-d on the CPU, or on the device of the norms, so that no copy waits for that."""
    multiplier, device = update.multiplier, update.norms.device
    if isinstance(multiplier, Tensor):  # on the CPU; a product of two 0-d tensors has the wider dtype
        multiplier = multiplier.to(exact_dtype(update.lr.device, multiplier.dtype))
    size = multiplier * update.lr
    size = size.to(exact_dtype(device, size.dtype))
    return size if size.is_cpu and not size.ndim else moved(size, device)


def gradient_norms(groups: Iterable[Group], grad_scale: Optional[Tensor]) -> dict[str, Tensor]:
    """Return the Frobenius norms of the gradients that are there, of matrices and of the rest; 0-d.

    Of a sharded one it is this rank's part. Gradients are divided by `grad_scale`.
    """
    gradients: dict[str, list[Tensor]] = {"muon_gradient_norm": [], "fallback_gradient_norm": []}
    for group in groups:
        parts = [local_part(p.grad) for p in group["params"] if p.grad is not None]
        branch = "muon_gradient_norm" if group["use_muon"] else "fallback_gradient_norm"
        gradients[branch] += [part for part in parts if part.numel()]
    return {key: _norm(tensors, grad_scale) for key, tensors in gradients.items()}


def _norm(tensors: list[Tensor], grad_scale: Optional[Tensor]) -> Tensor:
    """Return the norm of all tensors together, divided by `grad_scale` if there is one."""
    if not tensors:  # zero whatever the scale, and the host would wait to divide by one that is on a device
        return torch.zeros((), dtype=torch.float64, device="cpu")
    exact = torch.float64
    for device in {tensor.device for tensor in tensors}:  # a dtype that each of them has
        exact = exact_dtype(device, exact)
    # In float64 no square overflows. Torch allows no dtype narrower than a gradient's, which may be float64 on a CPU
    # beside a device without it: then each norm has its gradient's dtype.
    is_narrower = exact != torch.float64 and any(tensor.dtype == torch.float64 for tensor in tensors)
    norms = torch._foreach_norm(tensors) if is_narrower else torch._foreach_norm(tensors, 2, exact)
    total = torch.stack([norm.to(exact).to(norms[0].device) for norm in norms]).norm()
    return total if grad_scale is None else total / grad_scale.to(total.device)
