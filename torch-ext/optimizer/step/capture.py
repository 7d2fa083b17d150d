"""Whether a step may be captured in a CUDA graph."""

from __future__ import annotations

from typing import Sequence

import torch

from ..parameters.rates import live_tensors
from ..parameters.settings import Group
from ..plan.plan import Plan


def check_capture(groups: Sequence[Group], reports: bool) -> None:
    """Raise RuntimeError while a CUDA graph is captured that would not repeat what a step of these groups does.

    `reports` says whether QK-clip reports its counts.
    """
    if not is_capturing():
        return
    if not all(group["capturable"] for group in groups):
        raise RuntimeError("a step can be captured in a CUDA graph only with Muon(..., capturable=True)")
    if any(value.device.type == "cpu" for group in groups for value in live_tensors(group)):
        raise RuntimeError("lr and weight_decay on the CPU cannot be read by a captured step: put them on the GPU")
    if reports:
        raise RuntimeError("a captured step cannot call the report of qk_clip: read metrics() instead")


def check_captured_plan(plan: Plan) -> None:
    """Raise RuntimeError while a CUDA graph is captured, if ranks share parameters."""
    if plan.terms and is_capturing():
        raise RuntimeError("a step of parameters that several ranks share cannot be captured in a CUDA graph")


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
