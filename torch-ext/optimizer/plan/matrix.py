"""The records of a parameter and of its matrices: all that a step needs to know of them and that no step changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Hashable, Iterable, Optional

import torch

from ..iteration import Iteration, iteration_costs
from ..kernels.gains import ALONE, Circumstances
from ..parameters.matrices import MatrixView
from ..parameters.settings import Group, multiplier_in_group
from ..parameters.state import moments_dtype
from ..rules.equalization import Equalization
from ..schedules import Schedule
from .costs import WORTH_SENDING, flops, owners_cost
from .process_groups import Ranks, this_rank, world_size
from .shards import Part, Shards


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter of Muon; numbers count the parameters and groups of this rank. Equal to itself alone."""

    number: int  # among Muon's parameters
    name: str
    group: int  # number of its parameter group
    position: int  # in that group
    stack_group: int  # number of the first group whose matrices may be stacked with those of this one
    schedule: Schedule
    view: MatrixView
    shards: Optional[Shards]  # None: this process alone has it
    sharers: Optional[Ranks]  # the ranks that have something of it, likewise
    device: torch.device
    dtype: torch.dtype
    momentum_dtype: torch.dtype
    work_dtype: torch.dtype
    equalization: Equalization
    moments_view: Optional[MatrixView]  # of the tensor that has its second moments, where it has some
    keeps_norm: bool = False  # a step replaces its matrices by others of the same norm

    def matrices(self, group: Group, choose: Callable[..., Iteration]) -> tuple[Matrix, ...]:
        """Return its matrices by the settings of its group and `choose`, which is `choose_iteration` with a cache.

        Raises ValueError where the group's method is not safe in the work dtype.
        """
        alike = {}  # of each size, all that its matrices have in common
        for rows, cols in set(self.view.shapes):
            size = min(rows, cols), max(rows, cols)
            alike[rows, cols] = {
                "rows": rows,
                "cols": cols,
                "multiplier": multiplier_in_group(group, rows, cols) * self.view.scale,
                "iteration": choose(
                    self.device, self.work_dtype, size, self.schedule, group["ns_method"], self.circumstances
                ),
                "shards": self.shards,
                "cost": owners_cost(rows, cols, len(self.schedule) * self.equalization.rounds(rows, cols)),
            }
        return tuple(Matrix(self, index, **alike[size]) for index, size in enumerate(self.view.shapes))

    @property
    def circumstances(self) -> Circumstances:
        """What choices for its matrices depend on: ranks that may have copies of them take the same."""
        return Circumstances(among=self.sharers or ()) if world_size() > 1 else ALONE

    @property
    def is_here(self) -> bool:
        """Whether this rank is in the mesh that the parameter lies on."""
        return self.sharers is None or this_rank() in self.sharers

    @property
    def packed_dtype(self) -> torch.dtype:
        """A dtype for directions, which are not normalised yet: float16 has no room for 1e5, float32 none for 1e60."""
        if self.dtype == torch.float64:
            return torch.float64
        return torch.float32 if self.keeps_norm or self.work_dtype == torch.float16 else self.work_dtype

    @property
    def update_dtype(self) -> torch.dtype:
        """The dtype of what comes back from owners: updates, or new matrices where norms are kept."""
        return self.packed_dtype if self.keeps_norm else self.work_dtype

    @property
    def momentum_described(self) -> str:
        """What `explain()` says of how its momentum is stored."""
        return ", momentum in 8 bits" if self.momentum_dtype == torch.int8 else ""

    @property
    def moments_dtype(self) -> torch.dtype:
        """The dtype of its second moments."""
        return moments_dtype(self.dtype)

    @property
    def moments_described(self) -> str:
        """What second moments do to its updates, for `explain()`."""
        if self.moments_view is None:
            return ""
        return f", {'rows' if self.moments_view.cols == 1 else 'columns'} balanced by second moments"

    @property
    def family(self) -> Hashable:
        """What parameters have in common whose matrices are exchanged in the same messages."""
        return self.sharers, self.device, self.dtype, self.momentum_dtype, self.stack_group


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix of a parameter, and how it is orthogonalized; equal to itself alone."""

    parameter: Parameter
    index: int  # among the parameter's matrices
    rows: int  # of the whole matrix, wherever its parts lie
    cols: int
    multiplier: float  # of the learning rate
    iteration: Iteration
    shards: Optional[Shards]  # the parameter's; in an exchange, limited to the replicas that work together
    cost: int  # to its owner, by `owners_cost`; to each rank of a team, by `team_cost`
    team_size: int = 1  # ranks that work on it together

    @property
    def key(self) -> tuple[int, int]:
        """The parameter's number and the index: the same for all records of one matrix."""
        return self.parameter.number, self.index

    @property
    def measured_as(self) -> tuple[torch.device, torch.dtype, tuple[int, int]]:
        """What measurements of its products are of: the device, their dtype, and the short and the long side."""
        size = min(self.rows, self.cols), max(self.rows, self.cols)
        return self.parameter.device, self.iteration.chain_dtype, size

    @property
    def batch_key(self) -> Hashable:
        """What matrices of one batch have in common."""
        return self.parameter.family, self.rows, self.cols, self.multiplier

    @property
    def work(self) -> int:
        """What it costs all ranks that work on it."""
        return self.cost * self.team_size

    @property
    def flops(self) -> float:
        """About what its orthogonalization takes in all, in FLOPs at the rate of torch's products.

        It is an estimate by `iteration_costs`, of the iteration and the gains that were chosen.
        """
        size, steps, windows = sorted((self.rows, self.cols)), len(self.parameter.schedule), len(self.iteration.windows)
        standard, gram = iteration_costs(*size, steps, windows, self.iteration.products)
        once = standard if self.iteration.method == "standard" else gram
        return once * self.parameter.equalization.rounds(self.rows, self.cols)

    @property
    def holders(self) -> Ranks:
        """The ranks that have something of the matrix: of a stack of experts, those that hold this one."""
        return self.shards.holders(self.index)

    @property
    def parts(self) -> int:
        """In how many parts each copy of the matrix lies."""
        return len(self.holders) // self.shards.copies

    @property
    def part_size(self) -> int:
        """How many elements the largest part has."""
        return -(-self.rows * self.cols // self.parts)

    def part(self, rank: int) -> Part:
        """Return what `rank` holds of the matrix."""
        return self.shards.part(self.index, rank)

    @property
    def moments_shape(self) -> Optional[tuple[int, int]]:
        """Rows and columns of its second moments, one of which is 1; None where it has none."""
        view = self.parameter.moments_view
        return None if view is None else view.shapes[self.index]

    def moments_part(self, rank: int) -> Part:
        """Return what `rank` holds of its second moments, nothing where there are none."""
        view = self.parameter.moments_view
        return Part((), ()) if view is None else self.shards.seen_as(view).part(self.index, rank)

    @property
    def has_owner(self) -> bool:
        """Whether one rank orthogonalizes it for others: it lies in parts, or in copies that are worth sending."""
        if self.shards is None:
            return False
        if not self.shards.is_whole(self.index):
            return True
        return self.shards.copies > 1 and flops(self.rows, self.cols) > WORTH_SENDING


def names_of_parameters(matrices: Iterable[Matrix]) -> tuple[str, ...]:
    """Return the names of the matrices' parameters, each once."""
    return tuple(dict.fromkeys(matrix.parameter.name for matrix in matrices))
