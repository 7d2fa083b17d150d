"""The weights of convolutions: which of their dimensions are rows, and the rows of their groups."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...parameters.routing import MIN_SIDE

CONVOLUTION = nn.modules.conv._ConvNd


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
