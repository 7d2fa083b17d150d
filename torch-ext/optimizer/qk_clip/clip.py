"""QK-clip: rows of query and key weights scaled down, head by head, where attention logits have grown too large.

For a head whose largest logit exceeds the threshold, gamma = threshold / largest, else 1; which power of it scales
which rows is decided in `heads`. Everything stays on the device, and all layers are computed together.

Source: Kimi Team, Kimi K2, arXiv:2507.20534, section 2.1 and algorithm 1.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..plan.layout import layout_of
from ..plan.process_groups import Ranks, all_reduce_max_
from .heads import ClipPlan, Layer, clip_settings, plan_clip


class ClipState(NamedTuple):
    """What a device holds for a plan: the largest logit of every head, and the rows that it acts on."""

    largest: Tensor  # float32 (heads + 1); -inf where none was seen, always in the last, which is no head
    heads: Tensor  # int64 (runs, most heads of one), filled up with the last
    exponents: Tensor  # float64 (runs)
    run_of_row: Tensor  # int64 (rows of all weights)


def clip_state(plan: ClipPlan, device: torch.device) -> ClipState:
    """Return the tensors of `plan` on `device`, with nothing observed."""
    nobody = sum(layer.heads for layer in plan.layers)
    runs = [
        run._replace(heads=tuple(layer.first + head for head in run.heads))
        for layer in plan.layers
        for runs_of_weight in layer.weights.values()
        for run in runs_of_weight
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
        largest = state.largest[known.first : known.first + known.heads]
        torch.maximum(largest, logits.detach().reshape(-1, known.heads).amax(0).to(largest.dtype), out=largest)


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
    rows = {name: sum(run.rows for run in runs) for layer in plan.layers for name, runs in layer.weights.items()}
    return dict(zip(rows, of_runs[state.run_of_row].split(list(rows.values()))))


def clip_counts(plan: ClipPlan, state: ClipState) -> Tensor:
    """Return, int64 (2), how many heads `row_scales` scales down now, and how many not, as a logit was not finite."""
    not_finite = state.largest.isnan() | state.largest.isposinf()
    return torch.stack([_clipped(plan, state).sum(), not_finite.sum()])


def _clipped(plan: ClipPlan, state: ClipState) -> Tensor:
    return (state.largest > plan.threshold) & state.largest.isfinite()


class QKClip:
    """QK-clip over an optimizer's parameters by `settings`: those of `heads.clip_settings`, and `report`.

    `report(clipped, not_finite)` is called with the counts of heads of a step when the next one begins, by when the
    device has long had them.
    """

    def __init__(self, settings: Mapping[str, Any]):
        settings = dict(settings)
        self._report: Optional[Callable[[int, int], None]] = settings.pop("report", None)
        self._settings = clip_settings(settings)
        self._parameters: dict[str, Tensor] = {}
        self._plan: Optional[ClipPlan] = None
        self._ranks: Optional[Ranks] = None
        self._state: Optional[ClipState] = None
        self.counts: Optional[Tensor] = None  # int64 (2): heads clipped at the last step, and heads not finite

    def __str__(self) -> str:
        return f"qk_clip {self._settings}"

    @property
    def reports(self) -> bool:
        """Whether there is somebody to tell."""
        return self._report is not None

    def follow(self, names: Sequence[str], parameters: Sequence[Tensor], copies: Optional[Ranks] = None) -> None:
        """Make the plan for these parameters; what was observed is kept where the heads are the same.

        `copies` are the ranks that each have a copy of every plain parameter. What any rank has observed counts.
        """
        self._parameters = dict(zip(names, parameters))
        plan = plan_clip(self._settings, {name: tuple(p.shape) for name, p in self._parameters.items()})
        layouts = [layout_of(name, self._parameters[name], copies) for layer in plan.layers for name in layer.weights]
        meshes = {layout.mesh.members for layout in layouts if layout is not None}
        if len(meshes) > 1:
            got = f"queries and keys lie on {len(meshes)} groups of ranks, {sorted(meshes)}"
            raise ValueError(f"QK-clip needs all its layers on the same ranks: {got}")
        self._ranks = next(iter(meshes), None)
        device = next(self._parameters[name] for layer in plan.layers for name in layer.weights).device
        if plan != self._plan or self._state is None or self._state.largest.device != device:
            self._plan, self._state = plan, clip_state(plan, device)

    def observe_(self, layer: Layer, logits: Tensor) -> None:
        """Raise the largest logits seen of one layer to `logits` (..., heads); errors are those of `observe_`."""
        observe_(self._plan, self._state, layer, logits)

    def take_scales(self) -> dict[Tensor, Tensor]:
        """Return the factor of each row of the parameters that QK-clip may scale, float32, and forget the logits."""
        if self._report is not None and self.counts is not None:
            self._report(*map(int, self.counts))
        if self._ranks is not None:
            # An infinity is not finite wherever it was a NaN, of which a maximum over ranks may know nothing.
            self._state.largest.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            all_reduce_max_(self._state.largest, self._ranks, "attention logits")
        self.counts = clip_counts(self._plan, self._state)
        scales = row_scales(self._plan, self._state)
        reset_(self._state)
        return {self._parameters[name]: scale for name, scale in scales.items()}
