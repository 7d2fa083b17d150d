"""The records of a parameter and of its matrices: everything that a step needs to know and that no step changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Hashable, Iterable, Optional

import torch

from ..iteration import Iteration, iteration_costs, summed_iteration
from ..kernels.circumstances import ALONE, Circumstances
from ..kernels.formats import unnormalized_dtype
from ..parameters.matrices import MatrixView
from ..parameters.settings import Group, multiplier_in_group
from ..parameters.state import moments_dtype
from ..rules.equalization import Equalization
from ..schedules import Schedule
from .costs import WORTH_SENDING, owners_cost, standard_step_flops
from .process_groups import Ranks, this_rank, world_size
from .shards import Part, Shards


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter of Muon. Numbers count this rank's parameters and groups. Two records are never equal."""

    number: int  # among Muon's parameters
    name: str
    seed: int  # of stochastic rounding, 63 bits of its name: ranks that share it may number it differently
    group: int  # number of its parameter group
    position: int  # in that group
    stack_group: int  # number of the first group whose matrices may be stacked with those of this one
    schedule: Schedule
    view: MatrixView
    shards: Optional[Shards]  # None: only this process has it
    device: torch.device
    dtype: torch.dtype
    momentum_dtype: torch.dtype
    work_dtype: torch.dtype
    equalization: Equalization
    moments_view: Optional[MatrixView]  # of the tensor with its second moments, if it has any
    keeps_norm: bool = False  # Hyperball: a step replaces its matrices by others of the same norm
    offloaded: bool = False  # its momentum is in host memory between steps

    def matrices(self, group: Group, choose: Callable[..., Iteration]) -> tuple[Matrix, ...]:
        """Return its matrices by the settings of its group. `choose` is `choose_iteration` with a cache.

        Raises ValueError if the group's method is not safe in the work dtype.
        """
        alike = {}  # for each size, what all of its matrices have in common
        circumstances = self.circumstances._replace(default_dtype=group["ns_dtype"] is None)
        for rows, cols in set(self.view.shapes):
            size = min(rows, cols), max(rows, cols)
            alike[rows, cols] = {
                "rows": rows,
                "cols": cols,
                "multiplier": multiplier_in_group(group, rows, cols, self.view.scale),
                "iteration": choose(
                    self.device, self.work_dtype, size, self.schedule, group["ns_method"], circumstances
                ),
                "shards": self.shards,
                "cost": owners_cost(rows, cols, len(self.schedule) * self.equalization.rounds(rows, cols)),
            }
        return tuple(Matrix(self, index, **alike[size]) for index, size in enumerate(self.view.shapes))

    @property
    def sharers(self) -> Optional[Ranks]:
        """The ranks that hold a part or copy of it; None: only this process."""
        return None if self.shards is None else self.shards.layout.mesh.members

    @property
    def circumstances(self) -> Circumstances:
        """What the choice of products depends on besides the size: ranks with copies of a matrix must choose alike."""
        return Circumstances(among=self.sharers or ()) if world_size() > 1 else ALONE

    @property
    def is_here(self) -> bool:
        """Whether this rank is in the mesh of the parameter."""
        return self.sharers is None or this_rank() in self.sharers

    @property
    def packed_dtype(self) -> torch.dtype:
        """The dtype of directions. Of float64 matrices it is float64: others would overflow."""
        if self.dtype == torch.float64:
            return torch.float64
        return torch.float32 if self.keeps_norm else unnormalized_dtype(self.work_dtype)

    @property
    def update_dtype(self) -> torch.dtype:
        """The dtype in which owners send results: updates, or, when norms are kept, new matrices."""
        return self.packed_dtype if self.keeps_norm else self.work_dtype

    @property
    def moments_dtype(self) -> torch.dtype:
        """The dtype of its second moments."""
        return moments_dtype(self.dtype)

    @property
    def family(self) -> Hashable:
        """What parameters must have in common for their matrices to be exchanged in the same messages."""
        return self.sharers, self.device, self.dtype, self.momentum_dtype, self.stack_group


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix of a parameter, and how it is orthogonalized. Two records are never equal."""

    parameter: Parameter
    index: int  # among the parameter's matrices
    rows: int  # of the whole matrix, not of this rank's part
    cols: int
    multiplier: float  # of the learning rate
    iteration: Iteration
    shards: Optional[Shards]  # the parameter's; in an exchange, limited to the replicas that work together
    cost: int  # to its owner, by `owners_cost`; with a team, to each member, by `team_cost`
    team_size: int = 1  # how many ranks work on it together

    @property
    def key(self) -> tuple[int, int]:
        """The parameter's number and the index, the same for all records of one matrix."""
        return self.parameter.number, self.index

    @property
    def size(self) -> tuple[int, int]:
        """Its short and its long side."""
        return min(self.rows, self.cols), max(self.rows, self.cols)

    def summed_iteration(self, method: str) -> Optional[Iteration]:
        """Return how ranks work on it from a Gram matrix that they sum, by `gram` or `gram_float32`; None if unsafe."""
        p = self.parameter
        return summed_iteration(p.device, p.work_dtype, self.size, p.schedule, method, p.circumstances)

    @property
    def measured_as(self) -> tuple[torch.device, torch.dtype, tuple[int, int]]:
        """Device, dtype, and short and long side: what measurements of its products are looked up by."""
        device, iteration = self.parameter.device, self.iteration
        return device, iteration.work_dtype if device.type == "cpu" else iteration.chain_dtype, self.size

    @property
    def batch_key(self) -> Hashable:
        """What the matrices of one batch must have in common."""
        return self.parameter.family, self.rows, self.cols, self.multiplier

    @property
    def work(self) -> int:
        """The total cost to all ranks that work on it."""
        return self.cost * self.team_size

    @property
    def flops(self) -> float:
        """About what its orthogonalization takes in all, in FLOPs at the rate of torch's products.

        It is an estimate by `iteration_costs`, of the iteration and the gains that were chosen.
        """
        steps, windows = len(self.parameter.schedule), len(self.iteration.windows)
        standard, gram = iteration_costs(*self.size, steps, windows, self.iteration.products)
        once = standard if self.iteration.method == "standard" else gram
        return once * self.parameter.equalization.rounds(self.rows, self.cols)

    @property
    def holders(self) -> Ranks:
        """The ranks that have a part of the matrix. An expert of a stack is on some of the parameter's ranks only."""
        return self.shards.holders(self.index)

    @property
    def parts(self) -> int:
        """The number of parts into which each copy of the matrix is cut."""
        return len(self.holders) // self.shards.copies

    @property
    def ranks_per_copy(self) -> int:
        """The number of ranks that each copy of the parameter is on. Experts of a stack may be whole on one of them."""
        return len(self.shards.layout.mesh.members) // self.shards.copies

    @property
    def part_size(self) -> int:
        """The elements of the largest part, or more if a part has rows of several matrices."""
        return self.shards.largest_part(self.index)

    def part(self, rank: int) -> Part:
        """Return the rows and columns of the matrix that `rank` holds."""
        return self.shards.part(self.index, rank)

    @property
    def moments_shape(self) -> Optional[tuple[int, int]]:
        """Rows and columns of its second moments, one of which is 1; None if it has none."""
        view = self.parameter.moments_view
        return None if view is None else view.shapes[self.index]

    def moments_part(self, rank: int) -> Part:
        """Return which of its second moments `rank` holds: an empty part if there are none."""
        view = self.parameter.moments_view
        return Part((), ()) if view is None else self.shards.seen_as(view).part(self.index, rank)

    @property
    def has_owner(self) -> bool:
        """Whether one rank orthogonalizes it for others: it is cut into parts, or its copies are worth sending."""
        if self.shards is None:
            return False
        if not self.shards.is_whole(self.index):
            return True
        return self.shards.copies > 1 and standard_step_flops(self.rows, self.cols) > WORTH_SENDING


def names_of_parameters(matrices: Iterable[Matrix]) -> tuple[str, ...]:
    """Return the names of the matrices' parameters, each once."""
    return tuple(dict.fromkeys(matrix.parameter.name for matrix in matrices))
