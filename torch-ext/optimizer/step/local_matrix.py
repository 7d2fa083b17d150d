"""This process's shards of parameters and matrices, and the tensors that a step uses for them.

A step looks up the tensors of parameters and momentum when it begins and drops them when it ends. So memory that is
replaced between steps, such as state that moves to the host, is free at once.
"""

from __future__ import annotations

from functools import partial
from typing import Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..parameters.matrices import MatrixView
from ..parameters.momentum_blocks import in_blocks
from ..parameters.settings import Group
from ..parameters.state import BUFFER, MOMENTS, REMAINDER, SCALE, integers
from ..plan.layout import local_part
from ..plan.matrix import Matrix, Parameter
from ..plan.process_groups import this_rank
from ..plan.shards import local_rows
from ..rules.momentum import MomentumBuffers

# Keys of a parameter's state that only some parameters have, and the key of QK-clip's factors, which are not state.
OF_STATE = (SCALE, MOMENTS, REMAINDER)
ROW_SCALE = "row_scale"


class StepTensors:
    """The tensors of a step for each matrix of which this process has a part, by its `slot`; and all gradients."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all tensors."""
        self.views: list[Tensor] = []  # of the parameters
        self.momenta: list[Tensor] = []
        self.gradients: list[Optional[Tensor]] = []  # of whole parameters, by their `number`; None if it was released
        self.states: list[dict[str, Tensor]] = []  # of parameters, in the order of the optimizer's
        self.absent: frozenset[int] = frozenset()  # numbers of the parameters without a gradient
        # By key, then by slot, what only some matrices have: scales of momentum in 8 bits, second moments, the lower
        # halves of float32 values, and QK-clip's float32 factors for rows.
        self.others: dict[str, dict[int, Tensor]] = {key: {} for key in (*OF_STATE, ROW_SCALE)}


class LocalParameter:
    """This process's part of one parameter of Muon: its matrices from `first_slot` on, and in a step its gradient."""

    def __init__(
        self,
        parameter: Parameter,
        p: Tensor,
        number: int,
        state_index: int,
        tensors: StepTensors,
        release_grad: bool,
    ):
        self.tensor = p
        self.number = number  # among all parameters of the optimizer
        self.state_index = state_index  # of its state, in the optimizer's
        self.first_slot = 0  # set by the workspace
        self._tensors = tensors
        self._shards = parameter.shards
        self._release = release_grad
        self._view = parameter.view if self._shards is None else self._shards.local(this_rank())[0]
        views = {BUFFER: self._view, MOMENTS: _local_moments_view(parameter)}
        if parameter.momentum_dtype == torch.int8:
            views[SCALE] = in_blocks(parameter.name, self._view)
        self.is_whole = self._view.is_plain  # its local tensor is its one matrix
        self._is_empty = not local_part(p).numel()
        is_empty_shard = self._is_empty and self._shards is not None
        # What cuts the local tensors of a key of the state. Those of BUFFER are laid out like the parameter's.
        self._cuts = {
            key: partial(_empty_matrices, view) if is_empty_shard else view.matrices
            for key, view in views.items()
            if view is not None
        }
        self.end_step()

    def cut(self, local: Tensor, read_only: bool = False) -> list[Tensor]:
        """Return the matrices of a local tensor that is laid out like the parameter's."""
        return [local] if self.is_whole else self._cuts[BUFFER](local, read_only)

    def cut_rows(self, row_scale: Tensor) -> list[Tensor]:
        """Return the factors of each matrix's rows, from those of all rows of the whole parameter."""
        layout = None if self._shards is None else self._shards.layout
        return self._view.row_values(local_rows(row_scale, layout, this_rank()))

    def cut_state(self, state: Mapping[str, Tensor], key: str) -> list[Tensor]:
        """Return what each matrix has of the tensor at `key` of the parameter's state."""
        local = local_part(state[key])
        return self.cut(integers(local)) if key == REMAINDER else self._cuts[key](local)

    @property
    def has_gradient(self) -> bool:
        """Whether there was a gradient when this step began."""
        return self.number not in self._tensors.absent

    @property
    def is_taken_as_it_is(self) -> bool:
        """Whether a step reads its gradient itself as its one matrix, and keeps it."""
        return self.is_whole and self._shards is None and not self._release

    @property
    def is_released_unread(self) -> bool:
        """Whether its gradient is to be released and is empty here, so that no matrix of this rank will read it."""
        return self._release and self._is_empty

    def end_step(self) -> None:
        """Drop the gradient's matrices."""
        self._gradients: list[Optional[Tensor]] = []  # None for those already taken
        self._left = 0  # number of non-empty matrices still to take from a gradient that will be released

    def take_gradient(self, slot: int) -> Tensor:
        """Return the gradient's matrix in `slot`; each one can be taken once.

        The gradient is cut when its first matrix is taken. If gradients are to be released, the last one drops it.
        """
        if self.is_whole:
            gradient = self._gradient()
            if self._release:
                self.release_gradient()
            return gradient
        if not self._gradients:
            self._gradients = self.cut(self._gradient(), read_only=True)
            self._left = sum(matrix.numel() > 0 for matrix in self._gradients) if self._release else 0
        position = slot - self.first_slot
        part, self._gradients[position] = self._gradients[position], None
        self._left -= 1
        if self._release and not self._left:
            self.release_gradient()
            self._gradients = []
        return part

    def release_gradient(self) -> None:
        """Set `.grad` to None, which frees its memory."""
        self.tensor.grad = self._tensors.gradients[self.number] = None

    def _gradient(self) -> Tensor:
        gradient = self._tensors.gradients[self.number]
        return gradient if self._shards is None else local_part(gradient)


class LocalMatrix(NamedTuple):
    """This process's part of a matrix, rows x cols, which has the same slot in each list of a step's `tensors`."""

    matrix: Matrix
    source: LocalParameter
    tensors: StepTensors
    slot: int
    origin: Optional[tuple[int, int, int]]  # its first row and column in the whole, and the whole's columns

    @property
    def view(self) -> Tensor:
        """The parameter's part, in this step."""
        return self.tensors.views[self.slot]

    def get(self, key: str) -> Optional[Tensor]:
        """Return what the part has at a key of `StepTensors.others` in this step."""
        return self.tensors.others[key].get(self.slot)

    def seed(self, groups: Sequence[Group]) -> int:
        """Return the seed for rounding the matrix stochastically.

        It is another one in each step, and for each of a parameter's first 2**20 matrices.
        """
        parameter = self.matrix.parameter
        of_step = (groups[parameter.group]["rounding_step"] << 20) + self.matrix.index
        return (parameter.seed + of_step) % (1 << 63)


def _empty_matrices(view: MatrixView, local: Tensor, read_only: bool = False) -> list[Tensor]:
    """Return the matrices of a shard without elements, of whose sides `fully_shard` may have kept none."""
    return [local.new_empty(size) for size in view.shapes]


def _local_moments_view(parameter: Parameter) -> Optional[MatrixView]:
    """Return how the local part of the tensor with second moments is seen; None if the parameter has none."""
    view, shards = parameter.moments_view, parameter.shards
    return view if view is None or shards is None else shards.seen_as(view).local(this_rank())[0]


def views_of(parts: Sequence[LocalMatrix]) -> list[Tensor]:
    """Return the parameters' parts in this step."""
    views = parts[0].tensors.views
    return [views[part.slot] for part in parts]


def others_of(parts: Sequence[LocalMatrix], key: str) -> Optional[list[Tensor]]:
    """Return what parts, which are all alike, have at a key of `StepTensors.others` in this step; None if nothing."""
    values = parts[0].tensors.others[key]
    return [values[part.slot] for part in parts] if parts[0].slot in values else None


def momentum_of(parts: Sequence[LocalMatrix]) -> MomentumBuffers:
    """Return the momentum of parts, which have it in one form."""
    values = parts[0].tensors.momenta
    return MomentumBuffers([values[part.slot] for part in parts], others_of(parts, SCALE))


def take_momentum_(parts: Sequence[LocalMatrix], tensors: Sequence[Tensor]) -> None:
    """Let `tensors` be the momentum of parts in this step: the values of all, then their scales if they have any."""
    for part, momentum in zip(parts, tensors):
        part.tensors.momenta[part.slot] = momentum
    for part, scale in zip(parts, tensors[len(parts) :]):
        part.tensors.others[SCALE][part.slot] = scale
