"""The workspace: the tensors of this process that belong to the plan's records, looked up once, not in every step."""

from __future__ import annotations

import itertools
import operator
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence, Union

from torch import Tensor

from ..kernels.formats import HALF_DTYPES
from ..parameters.offload import HostChunks
from ..parameters.sequences import grouped
from ..parameters.settings import Group
from ..parameters.state import BUFFER, SCALE, State
from ..plan.batches import Batch
from ..plan.exchanges import Chunk
from ..plan.gram_sums import SummedBatch
from ..plan.layout import has_shards, local_part
from ..plan.matrix import Matrix
from ..plan.plan import Plan, local_indices
from ..plan.process_groups import this_rank
from ..rules.descent import as_tensor
from .fallback import local_fallback
from .gradients import Gradients
from .local_chunk import LocalChunk, local_chunk
from .local_matrix import OF_STATE, ROW_SCALE, LocalMatrix, LocalParameter, StepTensors
from .recipe import RecipeKey, recipe_key


class LocalBatch(NamedTuple):
    """A batch and this process's parts of it; momentum may be in host memory, as one of several chunks.

    `gradient_numbers` are those of the parts' parameters, if a step takes all of these gradients as they are.
    """

    batch: Union[Batch, SummedBatch]
    parts: Sequence[LocalMatrix]  # those that are not empty
    multiplier: Tensor
    recipe_key: RecipeKey
    gradient_numbers: tuple[int, ...] = ()
    host: Optional[HostChunks] = None
    host_chunk: int = 0

    def with_parts(self, parts: Sequence[LocalMatrix]) -> LocalBatch:
        """Return the batch with only these parts."""
        as_they_are = all(part.source.is_taken_as_it_is for part in parts)
        return self._replace(
            parts=parts,
            recipe_key=recipe_key([part.matrix for part in parts]) if parts else self.recipe_key,
            gradient_numbers=tuple(part.source.number for part in parts) if as_they_are else (),
        )

    def with_gradients(self) -> LocalBatch:
        """Return the batch with only those parts that have a gradient in this step: itself if all have one."""
        if not self.parts or not self.parts[0].tensors.absent:
            return self
        present = [part for part in self.parts if part.source.has_gradient]
        return self if len(present) == len(self.parts) else self.with_parts(present)

    def take_gradients(self) -> list[Tensor]:
        """Return the gradients of its parts, which all have one; only once in a step."""
        if self.gradient_numbers:
            gradients = self.parts[0].tensors.gradients
            return [gradients[number] for number in self.gradient_numbers]
        return [part.source.take_gradient(part.slot) for part in self.parts]


class Workspace:
    """Everything that a step of Muon changes on this process, in the order of the plan."""

    def __init__(self, plan: Plan, groups: Sequence[Group], state: State, release_grads: bool):
        self._tensors = StepTensors()
        self._parts: dict[tuple[int, int], LocalMatrix] = {}
        self._keys = list(state)
        state_indices = {p: i for i, p in enumerate(state)}
        # The number of the first parameter of each group.
        first_numbers = list(itertools.accumulate((len(group["params"]) for group in groups), initial=0))
        sources = {}
        for matrices in plan.matrices:
            parameter = matrices[0].parameter
            p = groups[parameter.group]["params"][parameter.position]
            if parameter.is_here and p in state:  # otherwise it is frozen and has no gradient
                number = first_numbers[parameter.group] + parameter.position
                source = LocalParameter(parameter, p, number, state_indices[p], self._tensors, release_grads)
                sources[source] = matrices
        # Parameters that are a single matrix come first: a step makes no list of matrices for them.
        self.parameters = sorted(sources, key=lambda source: not source.is_whole)
        self._of_parameters = [source.tensor for source in self.parameters]
        self._whole = sum(source.is_whole for source in sources)
        self._released_unread = [source for source in self.parameters if source.is_released_unread]
        self._others = [(source, key) for source in self.parameters for key in OF_STATE if key in state[source.tensor]]
        self._has_shards = has_shards(type(source.tensor) for source in sources)
        first = 0
        for source in self.parameters:
            first = self._add(source, sources[source], groups, first)
        works = dict(zip(plan.batches, _with_host(list(map(self._local_batch, plan.batches)), state)))
        self.chains = [[works[batch] for batch in chain] for chain in plan.local_chains()]
        self.exchanges = [(each.ranks, [self._local_chunk(chunk) for chunk in each.chunks]) for each in plan.exchanges]
        self.sums = [(batches[0].ranks, list(map(self._local_batch, batches))) for batches in plan.sums]
        self.fallback = [
            local_fallback(batch, groups[batch.group], first_numbers[batch.group], state_indices, self._tensors)
            for batch in plan.fallback
        ]

    def finds_states_in(self, state: State) -> bool:
        """Return whether the states of parameters are where this workspace looks for them."""
        return len(state) == len(self._keys) and all(map(operator.is_, state, self._keys))

    def begin_step(self, gradients: Gradients, state: State, row_scales: Mapping[Tensor, Tensor]) -> None:
        """Look up the tensors of all parameters, of which these are the gradients.

        Released ones become None in the list of `gradients`, which `end_step` empties. `row_scales` has QK-clip's
        factors for the rows of some of them.
        """
        self._tensors.gradients = gradients.tensors
        self._tensors.absent = gradients.absent
        self._tensors.views = self._matrices(self._of_parameters)
        self._tensors.states = states = list(state.values())
        self._tensors.momenta = self._matrices([states[source.state_index][BUFFER] for source in self.parameters])
        for source, key in self._others:
            others = source.cut_state(states[source.state_index], key)
            self._tensors.others[key].update(enumerate(others, source.first_slot))
        for source in self._released_unread:
            source.release_gradient()
        for source in self.parameters if row_scales else ():
            if source.tensor in row_scales:
                factors = source.cut_rows(row_scales[source.tensor])
                self._tensors.others[ROW_SCALE].update(enumerate(factors, source.first_slot))

    def end_step(self) -> None:
        """Drop the tensors, also after a step that has failed."""
        self._tensors.gradients.clear()
        self._tensors.clear()
        for source in self.parameters[self._whole :]:
            source.end_step()

    def synchronize(self) -> None:
        """Wait until all offloaded momentum is back in host memory."""
        for host in {work.host for chain in self.chains for work in chain} - {None}:
            host.synchronize()

    def _matrices(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the matrices of tensors that are laid out like the parameters, by their slots."""
        parts = list(map(local_part, tensors)) if self._has_shards else tensors
        whole = self._whole
        pairs = zip(self.parameters[whole:], parts[whole:])
        return parts[:whole] + [matrix for source, part in pairs for matrix in source.cut(part)]

    def _add(self, source: LocalParameter, matrices: Sequence[Matrix], groups: Sequence[Group], first: int) -> int:
        """Give a parameter's matrices the slots from `first` on, and return the next free slot."""
        source.first_slot, p, parameter = first, source.tensor, matrices[0].parameter
        rounds = groups[parameter.group]["stochastic_rounding"] and p.dtype in HALF_DTYPES
        views = source.cut(local_part(p))
        for slot, (index, view) in enumerate(zip(local_indices(parameter), views), first):
            if view.numel():
                matrix = matrices[index]
                origin = _origin(matrix) if rounds else None
                self._parts[matrix.key] = LocalMatrix(matrix, source, self._tensors, slot, origin)
        return first + len(views)

    def _local_chunk(self, chunk: Chunk) -> LocalChunk:
        return local_chunk(chunk, self._of(part.matrix for part in chunk.messages.holder.parts))

    def _local_batch(self, batch: Union[Batch, SummedBatch]) -> LocalBatch:
        parts, multiplier = self._of(batch.matrices), as_tensor(batch.first.multiplier)
        return LocalBatch(batch, (), multiplier, recipe_key(batch.matrices)).with_parts(parts)

    def _of(self, matrices: Iterable[Matrix]) -> list[LocalMatrix]:
        return [self._parts[matrix.key] for matrix in matrices if matrix.key in self._parts]


def dependencies(groups: Sequence[Group], state: State) -> list[Any]:
    """Return what a workspace depends on besides the plan: addresses of offloaded momentum, and groups with seeds."""
    offloaded = (p for group in groups if group["use_muon"] and group["offload"] for p in group["params"])
    momenta = [value for p in offloaded if p in state for key, value in state[p].items() if key in (BUFFER, SCALE)]
    addresses = [momentum.data_ptr() for momentum in momenta]
    return [*addresses, *(group["stochastic_rounding"] for group in groups)]


def _with_host(works: list[LocalBatch], state: State) -> list[LocalBatch]:
    """Return `works`; each one with offloaded momentum has a chunk of host memory, which its device fetches in turn."""
    devices = [work.batch.device for work in works]
    offloaded = [i for i, work in enumerate(works) if work.batch.first.parameter.offloaded]
    for positions in grouped(offloaded, devices.__getitem__):
        parts = [works[i].parts for i in positions]
        sources = {part.source for of_batch in parts for part in of_batch}
        cut = [
            {each: each.cut_state(state[each.tensor], key) for each in sources if key in state[each.tensor]}
            for key in (BUFFER, SCALE)
        ]
        momenta = [[tensor for of_key in cut for tensor in _of_parts(of_key, of_batch)] for of_batch in parts]
        host = HostChunks(momenta, devices[positions[0]])
        for chunk, i in enumerate(positions):
            works[i] = works[i]._replace(host=host, host_chunk=chunk)
    return works


def _of_parts(cut: Mapping[LocalParameter, Sequence[Tensor]], parts: Sequence[LocalMatrix]) -> list[Tensor]:
    """Return the tensors in `cut` for those parts that it has."""
    return [cut[part.source][part.slot - part.source.first_slot] for part in parts if part.source in cut]


def _origin(matrix: Matrix) -> tuple[int, int, int]:
    first = (0, 0) if matrix.shards is None else matrix.part(this_rank()).origin(matrix.parameter.name)
    return (*first, matrix.cols)
