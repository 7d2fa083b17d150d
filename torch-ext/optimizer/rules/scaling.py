"""Gradient scaling: what `torch.amp.GradScaler` tells a step about its gradients."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional

import torch
from torch import Tensor

from ..kernels.host_copy import moved


class GradientScaling(NamedTuple):
    """The gradients' factor, and 1 if they overflowed, else 0: float32 tensors of one element, or None if unscaled."""

    grad_scale: Optional[Tensor]
    found_inf: Optional[Tensor]

    def on(self, device: torch.device) -> GradientScaling:
        """Return both tensors on `device`, by `moved`."""
        return GradientScaling(*(t if t is None else moved(t, device) for t in self))


UNSCALED = GradientScaling(None, None)


class Scalings:
    """The gradient scale and overflow of a step for each set of ranks that has agreed on them.

    None stands for this process alone.
    """

    def __init__(self, agreed: Mapping[Optional[tuple[int, ...]], GradientScaling]):
        self._agreed = agreed
        self._moved: dict[tuple[Optional[tuple[int, ...]], torch.device], GradientScaling] = {}

    def __contains__(self, ranks: Optional[tuple[int, ...]]) -> bool:
        """Whether there is an entry for these ranks; there is none for a mesh that this rank is not in."""
        return ranks in self._agreed

    def on(self, ranks: Optional[tuple[int, ...]], device: torch.device) -> GradientScaling:
        """Return what holds for parameters on `device` that `ranks` share."""
        key = (ranks, device)
        if key not in self._moved:
            self._moved[key] = self._agreed[ranks].on(device)
        return self._moved[key]
