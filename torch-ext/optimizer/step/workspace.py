"""The workspace: what the plan's records stand for on this process, looked up once and not in every step.

Tensors of parameters and momentum are taken when a step begins and let go when it ends, so that memory which somebody
replaces between steps, such as a state that is moved to the host, is free at once.
"""

from __future__ import annotations

import itertools
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from ..parameters.offload import HostChunks
from ..parameters.settings import Group
from ..plan.batches import Batch, grouped
from ..plan.exchanges import Chunk
from ..plan.layout import local_part
from ..plan.matrix import Matrix, Parameter
from ..plan.plan import Plan, State, local_indices
from ..plan.process_groups import this_rank
from ..plan.shards import local_rows
from ..plan.sums import SummedBatch
from ..plan.teams import Team
from ..rules.descent import HALVES, as_tensor
from .owned import LocalOwned, local_owned
from .recipe import group_numbers


class LocalParameter:
    """What this process has of one parameter of Muon, and, while a step runs, its matrices, momentum and gradient."""

    def __init__(self, parameter: Parameter, p: Tensor, release_grad: bool):
        self.tensor = p
        self._shards = parameter.shards
        self._release = release_grad
        self._view = parameter.view if self._shards is None else self._shards.local(this_rank())[0]
        self._is_plain = self._view.is_plain
        self.end_step()

    def cut(self, local: Tensor, read_only: bool = False) -> list[Tensor]:
        """Return the matrices of a local tensor that is laid out like the parameter's."""
        return [local] if self._is_plain else self._view.matrices(local, read_only)

    def begin_step(self, local: Tensor, momentum: Optional[Tensor], row_scale: Optional[Tensor]) -> None:
        """Take the matrices of the local tensor and of its momentum, None if the parameter is frozen.

        `row_scale` has QK-clip's factor for each row of the whole.
        """
        if momentum is not None:
            self.views, self.momenta = self.cut(local), self.cut(momentum)
        if row_scale is not None:
            layout = None if self._shards is None else self._shards.layout
            self.row_scales = self._view.row_values(local_rows(row_scale, layout, this_rank()))
        self.has_gradient = self.tensor.grad is not None
        if self._release and not local.numel():  # as on other ranks, whose parts are read
            self.tensor.grad = None

    def end_step(self) -> None:
        """Let go of all tensors but the parameter."""
        self.views: list[Tensor] = []
        self.momenta: list[Tensor] = []
        self.row_scales: Optional[list[Tensor]] = None  # of QK-clip, for each local matrix
        self.has_gradient = False
        self._gradients: list[Optional[Tensor]] = []  # None for those that are taken
        self._left = 0  # how many of a gradient that is to be released are not taken, empty ones left out

    def take_gradient(self, position: int) -> Tensor:
        """Return the gradient's local matrix at `position`, once.

        The gradient is cut when the first is taken, and let go with the last where gradients are to be released.
        """
        if not self._gradients:
            gradient = self.tensor.grad if self._shards is None else local_part(self.tensor.grad)
            self._gradients = self.cut(gradient, read_only=True)
            self._left = sum(matrix.numel() > 0 for matrix in self._gradients) if self._release else 0
        part, self._gradients[position] = self._gradients[position], None
        self._left -= 1
        if self._release and not self._left:
            self.tensor.grad, self._gradients = None, []
        return part


class LocalMatrix(NamedTuple):
    """This process's part of a matrix, rows x cols, by its position among the local matrices of its parameter."""

    matrix: Matrix
    source: LocalParameter
    position: int
    origin: Optional[tuple[int, int, int]]  # its first row and column in the whole, and the whole's columns

    @property
    def view(self) -> Tensor:
        """The parameter's part, in this step."""
        return self.source.views[self.position]

    @property
    def momentum(self) -> Tensor:
        """The momentum buffer's part, in this step."""
        return self.source.momenta[self.position]

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient in this step."""
        return self.source.has_gradient

    @property
    def row_scale(self) -> Optional[Tensor]:
        """QK-clip's float32 factor for each row in this step."""
        return None if self.source.row_scales is None else self.source.row_scales[self.position]

    def gradient(self) -> Tensor:
        """Return the gradient, once in a step."""
        return self.source.take_gradient(self.position)

    def seed(self, groups: Sequence[Group]) -> int:
        """Return what this step rounds the matrix with stochastically.

        One for each matrix and step: 2**20 matrices a parameter, 2**20 parameters, and 2**23 steps.
        """
        parameter = self.matrix.parameter
        return (groups[parameter.group]["rounding_step"] << 40) + (parameter.number << 20) + self.matrix.index


def tensors_of(parts: Sequence[LocalMatrix]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the parameters, momentum buffers and gradients of parts that have a gradient; gradients once in a step."""
    views, momenta = [part.view for part in parts], [part.momentum for part in parts]
    return views, momenta, [part.gradient() for part in parts]


class LocalBatch(NamedTuple):
    """A batch and this process's parts of it; momentum may be in host memory, as one of several chunks."""

    batch: Union[Batch, SummedBatch]
    parts: Sequence[LocalMatrix]  # those that are not empty
    multiplier: Tensor
    host: Optional[HostChunks] = None
    host_chunk: int = 0


class LocalChunk(NamedTuple):
    """A chunk of exchanged matrices: the parts that this rank holds, and the plan's places as tensors on the device."""

    chunk: Chunk
    parts: Sequence[LocalMatrix]
    group_numbers: tuple[int, ...]  # of the parts, by which a step finds their rules
    multipliers: Tensor  # of the parts, float64 on the CPU, where the descent reads it
    presence_out: Tensor  # of the flags of parts that are sent, in what is gathered, int64, as all that follow
    verdicts_in: Tensor  # of each part's flag in what comes back
    presence_in: Tensor  # (2, flags): owned matrix, place of the flag
    verdicts_out: Tensor  # (2, flags): owned matrix, place of the flag
    owned: Sequence[LocalOwned]
    teams: Sequence[tuple[Team, Optional[LocalOwned]]]  # with a batch where this rank owns the matrix


class Workspace:
    """All that a step of Muon changes on this process, in the order of the plan."""

    def __init__(self, plan: Plan, groups: Sequence[Group], state: State, release_grads: bool):
        self.parameters: list[LocalParameter] = []
        self._parts: dict[tuple[int, int], LocalMatrix] = {}
        for matrices in plan.matrices:
            if matrices[0].parameter.is_here:
                self._add(matrices, groups[matrices[0].parameter.group], state, release_grads)
        offloaded = [groups[batch.matrices[0].parameter.group]["offload"] for batch in plan.batches]
        self.batches = _with_host(list(map(self._local_batch, plan.batches)), offloaded, state)
        self.exchanges = [(each.ranks, [self._local_chunk(chunk) for chunk in each.chunks]) for each in plan.exchanges]
        self.sums = [(batches[0].ranks, list(map(self._local_batch, batches))) for batches in plan.sums]

    def begin_step(self, state: State, row_scales: Mapping[Tensor, Tensor]) -> None:
        """Take the tensors of all parameters; `row_scales` has QK-clip's factors of some of them."""
        tensors = [source.tensor for source in self.parameters]
        momenta = [None if entry is None else entry["momentum_buffer"] for entry in map(state.get, tensors)]
        parts = list(map(local_part, tensors)), list(map(local_part, momenta))
        for source, local, momentum in zip(self.parameters, *parts):
            source.begin_step(local, momentum, row_scales.get(source.tensor))

    def end_step(self) -> None:
        """Let go of them, also after a step that has failed."""
        for source in self.parameters:
            source.end_step()

    def synchronize(self) -> None:
        """Wait until host memory has all momentum that lives there."""
        for host in {work.host for work in self.batches} - {None}:
            host.synchronize()

    def _add(self, matrices: Sequence[Matrix], group: Group, state: State, release_grads: bool) -> None:
        parameter = matrices[0].parameter
        p = group["params"][parameter.position]
        source = LocalParameter(parameter, p, release_grads)
        self.parameters.append(source)
        if p not in state:  # frozen, and without a gradient
            return
        rounds = group["stochastic_rounding"] and p.dtype in HALVES
        for position, (index, view) in enumerate(zip(local_indices(parameter), source.cut(local_part(p)))):
            if view.numel():
                matrix = matrices[index]
                self._parts[matrix.key] = LocalMatrix(matrix, source, position, _origin(matrix) if rounds else None)

    def _local_chunk(self, chunk: Chunk) -> LocalChunk:
        holder, owner = chunk.messages.holder, chunk.messages.owner
        parts, device = self._of(holder.matrices), chunk.first.parameter.device

        def indices(places: Sequence, shape: Sequence[int] = (-1,)) -> Tensor:
            return torch.tensor(places, dtype=torch.int64, device=device).reshape(shape)

        return LocalChunk(
            chunk=chunk,
            parts=parts,
            group_numbers=group_numbers(holder.matrices or [chunk.first]),
            multipliers=as_tensor([part.matrix.multiplier for part in parts]),
            presence_out=indices([place for _, place in holder.presence_places]),
            verdicts_in=indices(holder.verdict_places),
            presence_in=indices(owner.presence_places, (-1, 2)).T,
            verdicts_out=indices(owner.verdict_places, (-1, 2)).T,
            owned=[local_owned(owned, device) for owned in chunk.batches],
            teams=[(team, owned and local_owned(owned, device)) for team, owned in chunk.teams],
        )

    def _local_batch(self, batch: Union[Batch, SummedBatch]) -> LocalBatch:
        return LocalBatch(batch, self._of(batch.matrices), as_tensor(batch.matrices[0].multiplier))

    def _of(self, matrices: Iterable[Matrix]) -> list[LocalMatrix]:
        return [self._parts[matrix.key] for matrix in matrices if matrix.key in self._parts]


def dependencies(groups: Sequence[Group], state: State) -> list[Any]:
    """Return what a workspace depends on besides the plan: where momentum in host memory is, and who needs seeds."""
    offloaded = (p for group in groups if group["use_muon"] and group["offload"] for p in group["params"])
    places = [state[p]["momentum_buffer"].data_ptr() for p in offloaded if p in state]
    return [*places, *(group["stochastic_rounding"] for group in groups)]


def _with_host(works: list[LocalBatch], offloaded: Sequence[bool], state: State) -> list[LocalBatch]:
    """Return `works`, with those that are `offloaded` as chunks of host memory that each device fetches in turn."""
    devices = [work.batch.matrices[0].parameter.device for work in works]
    for positions in grouped(itertools.compress(range(len(works)), offloaded), devices.__getitem__):
        parts = [works[i].parts for i in positions]
        sources = {part.source for some in parts for part in some}
        cut = {source: source.cut(local_part(state[source.tensor]["momentum_buffer"])) for source in sources}
        momenta = [[cut[part.source][part.position] for part in some] for some in parts]
        host = HostChunks(momenta, devices[positions[0]])
        for chunk, i in enumerate(positions):
            works[i] = works[i]._replace(host=host, host_chunk=chunk)
    return works


def _origin(matrix: Matrix) -> tuple[int, int, int]:
    first = (0, 0) if matrix.shards is None else matrix.part(this_rank()).origin()
    return (*first, matrix.cols)
