"""This rank's parts of matrices of which it learns only later whether anybody had a gradient."""

from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from ..rules.descent import Destination, Number, descend_packed_
from ..rules.momentum import pack_momentum_
from ..rules.qk_clip import scaled_rows
from .pipeline import LocalMatrix, Recipe, packed_row_scales, seeds


class Held:
    """Parts on their way through a step. What of the late ones' momentum is not known yet is kept beside the buffers.

    A part whose rank has no gradient, a late one, counts as zero if another rank has one. Then its momentum, too,
    follows; else all of it is left alone.
    """

    def __init__(self, parts: Sequence[LocalMatrix]):
        self.parts = parts
        self.late = frozenset(i for i, part in enumerate(parts) if part.gradients is None)
        self._buffers: list[Tensor] = []

    @record_function("muon.pack")
    def pack_(self, packed: Tensor, recipe: Recipe, places: Optional[Sequence[int]] = None) -> None:
        """Take the gradients into the momentum buffers, and the directions into `packed`, at `places` of a buffer."""
        self._buffers = [part.buffer.clone() if i in self.late else part.buffer for i, part in enumerate(self.parts)]
        gradients = [_gradient(part) for part in self.parts]
        pack_momentum_(self._buffers, gradients, packed, recipe.momentum, recipe.scaling, places)

    @record_function("muon.descend")
    def descend_(
        self,
        updates: Tensor,
        recipe: Recipe,
        multiplier: Number,
        verdicts: Tensor,
        places: Optional[Sequence[int]] = None,
    ) -> None:
        """Update the parameters of those parts whose verdict is above zero, by `updates`, at `places` of a buffer."""
        alive, overflow = verdicts > 0, recipe.scaling.found_inf
        rule = recipe.descent._replace(multiplier=multiplier)
        rounds = self.parts[0].seed is not None
        origins = [number for part in self.parts for number in part.origin] if rounds else None
        scales = packed_row_scales(self.parts)
        destination = Destination(scales, seeds(self.parts), overflow, alive, places, origins)
        descend_packed_([part.parameter for part in self.parts], updates, rule, destination)
        for i in sorted(self.late):
            part = self.parts[i]
            part.buffer.copy_(torch.where(alive[i], self._buffers[i], part.buffer))
            if part.row_scale is not None:  # QK-clip holds for what nobody updates, too
                scaled = scaled_rows(part.parameter, part.row_scale, overflow)
                part.parameter.copy_(torch.where(alive[i], part.parameter, scaled))


def _gradient(part: LocalMatrix) -> Tensor:
    return torch.zeros_like(part.parameter) if part.gradients is None else part.gradients.take(part.position)
