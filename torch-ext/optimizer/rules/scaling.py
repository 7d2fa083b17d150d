"""Gradient scaling: what `torch.amp.GradScaler` tells a step about its gradients."""

from __future__ import annotations

from typing import NamedTuple, Optional

from torch import Tensor


class GradientScaling(NamedTuple):
    """The gradients' factor, and 1 if they overflowed, else 0: float32 tensors of one element, or None if unscaled."""

    grad_scale: Optional[Tensor]
    found_inf: Optional[Tensor]


UNSCALED = GradientScaling(None, None)
