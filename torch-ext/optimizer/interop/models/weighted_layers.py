"""Linear layers and convolutions: how many features they read and write, and the rows of a convolution's weight."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor, nn

from ...parameters.routing import MIN_SIDE
from .attributes import attribute

CONVOLUTION = nn.modules.conv._ConvNd


def widths_of(module: nn.Module) -> Optional[tuple[int, int]]:
    """Return how many features a linear layer or convolution reads and writes; None if it is neither, or hides them."""
    if not isinstance(module, (nn.Linear, CONVOLUTION)):
        return None
    kind = "features" if isinstance(module, nn.Linear) else "channels"
    read, written = (attribute(module, f"{side}_{kind}") for side in ("in", "out"))
    return None if read is None or written is None else (read, written)


def has_rows_of_outputs(p: Tensor, owner: nn.Module) -> bool:
    """Whether a weight is that of a convolution whose rows are outputs, each of which reads all inputs."""
    is_forward = isinstance(owner, CONVOLUTION) and not owner.transposed
    return is_forward and p.shape[:2] == (owner.out_channels, owner.in_channels)


def by_group(p: Tensor, owner: nn.Module) -> dict[str, Any]:
    """Return the setting that cuts the weight of a grouped convolution, whose groups have no channels in common."""
    if not isinstance(owner, CONVOLUTION) or owner.groups == 1:
        return {}
    groups, channels = owner.groups, [owner.out_channels, owner.in_channels]
    rows, others = reversed(channels) if owner.transposed else channels
    # A parametrization has other tensors beside the weight, or in its place.
    is_cut = p.shape[:2] == (rows, others // groups) and rows // groups >= MIN_SIDE
    return {"split_rows": (rows // groups,) * groups} if is_cut else {}
