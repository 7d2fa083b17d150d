"""QK-clip over an optimizer's parameters: what was observed since the last step, and which rows it scales."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor

from .attention import ClipPlan, Layer, clip_settings, plan_clip
from .distributed.agreement import take_largest_
from .distributed.placement import layout_of
from .rules.qk_clip import ClipState, clip_counts, clip_state, observe_, reset_, row_scales


class Clipping:
    """QK-clip by `settings`, which are those of `attention.clip_settings` and `report`.

    `report(clipped, not_finite)` is called with the counts of heads of a step when the next one begins, by when the
    device has long had them.
    """

    def __init__(self, settings: Mapping[str, Any]):
        own = dict(settings)
        self._report: Optional[Callable[[int, int], None]] = own.pop("report", None)
        self._settings = clip_settings(own)
        self._parameters: dict[str, Tensor] = {}
        self._plan: Optional[ClipPlan] = None
        self._ranks: Optional[tuple[int, ...]] = None
        self._state: Optional[ClipState] = None
        self.counts: Optional[Tensor] = None  # int64 (2): heads clipped at the last step, and heads not finite

    def __str__(self) -> str:
        return f"qk_clip {self._settings}"

    @property
    def reports(self) -> bool:
        """Whether there is somebody to tell."""
        return self._report is not None

    def follow(
        self, names: Sequence[str], parameters: Sequence[Tensor], shared: Optional[tuple[int, ...]] = None
    ) -> None:
        """Make the plan for these parameters; what was observed is kept where the heads are the same.

        `shared` are the ranks that each have a copy of every plain parameter. What any rank has observed counts.
        """
        self._parameters = dict(zip(names, parameters))
        plan = plan_clip(self._settings, {name: tuple(p.shape) for name, p in self._parameters.items()})
        layouts = [layout_of(name, self._parameters[name], shared) for layer in plan.layers for name in layer.weights]
        meshes = {own.mesh.members for own in layouts if own is not None}
        if len(meshes) > 1:
            given = f"queries and keys lie on {len(meshes)} groups of ranks, {sorted(meshes)}"
            raise ValueError(f"QK-clip needs all its layers on the same ranks: {given}")
        self._ranks = next(iter(meshes), None)
        device = next(self._parameters[name] for layer in plan.layers for name in layer.weights).device
        if plan != self._plan or self._state is None or self._state.largest.device != device:
            self._plan, self._state = plan, clip_state(plan, device)

    def observe_(self, layer: Layer, logits: Tensor) -> None:
        """Raise the largest logits seen of one layer to `logits` (..., heads); ValueError as `rules.qk_clip`."""
        observe_(self._plan, self._state, layer, logits)

    def scales(self) -> dict[Tensor, Tensor]:
        """Return the factor of each row of the parameters that QK-clip may scale, float32, and begin anew."""
        self._tell()
        if self._ranks is not None:
            # An infinity is not finite wherever it was a NaN, of which a maximum over ranks may know nothing.
            self._state.largest.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            take_largest_(self._state.largest, self._ranks, "attention logits")
        self.counts = torch.stack(clip_counts(self._plan, self._state))
        found = row_scales(self._plan, self._state)
        reset_(self._state)
        return {self._parameters[name]: scale for name, scale in found.items()}

    def _tell(self) -> None:
        if self._report is not None and self.counts is not None:
            self._report(*map(int, self.counts))
