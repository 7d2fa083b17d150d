"""QK-clip: rows of query and key weights scaled down, head by head, where attention logits have grown too large.

For a head whose largest logit exceeds the threshold, gamma = threshold / largest, else 1; which power of it scales
which rows is `attention`'s. Everything stays on the device, and all layers are computed together.

Source: Kimi Team, Kimi K2, arXiv:2507.20534, section 2.1 and algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..attention import ClipPlan, Layer


class ClipState(NamedTuple):
    """What a device holds for a plan: the largest logit of every head, and the rows that it acts on."""

    largest: Tensor  # float32 (heads + 1); -inf where none was seen, always in the last, which is no head
    heads: Tensor  # int64 (runs, most heads of one), filled up with the last
    exponents: Tensor  # float64 (runs)
    run_of_row: Tensor  # int64 (rows of all weights)


class ClipCounts(NamedTuple):
    """Heads that are scaled, and heads that cannot be since a logit was NaN or infinite: 0-d int64 tensors."""

    clipped: Tensor
    not_finite: Tensor


def clip_state(plan: ClipPlan, device: torch.device) -> ClipState:
    """Return the tensors of `plan` on `device`, with nothing observed."""
    nobody = sum(layer.heads for layer in plan.layers)
    runs = [
        run._replace(heads=tuple(layer.first + head for head in run.heads))
        for layer in plan.layers
        for own in layer.weights.values()
        for run in own
    ]
    width = max((len(run.heads) for run in runs), default=0) or 1
    heads = [[*run.heads, *[nobody] * (width - len(run.heads))] for run in runs]
    rows = torch.tensor([run.rows for run in runs], device="cpu")
    return ClipState(
        torch.full((nobody + 1,), -torch.inf, dtype=torch.float32, device=device),
        torch.tensor(heads, dtype=torch.int64, device=device),
        torch.tensor([run.exponent for run in runs], dtype=torch.float64, device=device),
        torch.repeat_interleave(rows).to(device),
    )


def observe_(plan: ClipPlan, state: ClipState, layer: Layer, logits: Tensor) -> None:
    """Raise the largest logits of one layer in `state`, in place, to those of `logits` (..., heads) that are larger.

    `logits` are the largest before the softmax, scaled as it sees them, or bounds of them such as log-sum-exps; they
    are on the state's device, which is not waited for. A NaN stays until `reset_`. Raises ValueError for a layer that
    the plan does not have, and for another number of heads or another device.
    """
    known = plan.by_key.get(layer)
    if known is None:
        raise ValueError(f"qk_clip has no layer {layer!r}, only {', '.join(map(repr, plan.by_key))}")
    if logits.shape[-1:] != (known.heads,) or logits.device != state.largest.device:
        raise ValueError(
            f"logits of layer {layer!r} must be (..., {known.heads}) on {state.largest.device}, "
            f"got {tuple(logits.shape)} on {logits.device}"
        )
    if logits.numel():
        seen = logits.detach().reshape(-1, known.heads).amax(0)
        own = state.largest[known.first : known.first + known.heads]
        torch.maximum(own, seen.to(own.dtype), out=own)


def reset_(state: ClipState) -> None:
    """Forget what was observed, in place: after each step, since other weights have other logits."""
    state.largest.fill_(-torch.inf)


def row_scales(plan: ClipPlan, state: ClipState) -> dict[str, Tensor]:
    """Return the factors of the rows of each weight and bias of the plan, float32, views of one tensor.

    They follow from what was observed since the last `reset_`, in float64 rounded once. A head that has seen a NaN or
    an infinity keeps its rows: no factor follows from those, and 0 would end the head. `clip_counts` counts it.
    """
    gamma = (plan.threshold / state.largest.double()).masked_fill(~_clipped(plan, state), 1.0)
    of_runs = gamma[state.heads].amin(1).pow(state.exponents).float()
    rows = {name: sum(run.rows for run in own) for layer in plan.layers for name, own in layer.weights.items()}
    return dict(zip(rows, of_runs[state.run_of_row].split(list(rows.values()))))


def scaled_rows(p: Tensor, row_scale: Tensor, found_inf: Optional[Tensor] = None) -> Tensor:
    """Return `p` with each row times its factor, in float32 at least; as it is where `found_inf` is not 0.

    A bias has one element a row.
    """
    kept = row_scale if found_inf is None else row_scale.where(found_inf == 0, 1)
    return p * kept.reshape(-1, *[1] * (p.ndim - 1))


def clip_counts(plan: ClipPlan, state: ClipState) -> ClipCounts:
    """Return how many heads `row_scales` scales down now, and how many it cannot."""
    not_finite = state.largest.isnan() | state.largest.isposinf()
    return ClipCounts(_clipped(plan, state).sum(), not_finite.sum())


def _clipped(plan: ClipPlan, state: ClipState) -> Tensor:
    return (state.largest > plan.threshold) & state.largest.isfinite()
