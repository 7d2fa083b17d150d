"""Plans of large models on many GPUs, as a step would follow them, and a model of links and GPUs to predict times."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch

from tools.scale.models import MODELS, Weights

# The dtypes of an element on its way to the owner and back, by the dtype of the products.
WIRE = {"bfloat16": (torch.bfloat16, torch.bfloat16), "float16": (torch.float32, torch.float16)}
STEPS = 5  # of the iteration
IN_FLIGHT = 2  # chunks that travel while another one is worked on
EXPERT_RANKS = 64  # the ranks among which the experts of a layer are split
SHARDS = 256  # of a parameter that is not an expert; further GPUs hold copies (HSDP)


@dataclass(frozen=True)
class Machine:
    """Constants that give seconds: a collective takes its bytes over the link and a latency for each other rank."""

    link_gb_per_s: float  # of each GPU, in one direction
    microseconds_per_peer: float
    tflop_per_s: float  # of the products

    def exchange(self, sent: float, peers: int) -> float:
        """Return the seconds of a collective in which a rank sends this many bytes."""
        return sent / (1e9 * self.link_gb_per_s) + 1e-6 * self.microseconds_per_peer * peers

    def products(self, flop: float) -> float:
        """Return the seconds of all steps of matrices of which one step costs `flop`."""
        return STEPS * flop / (1e12 * self.tflop_per_s)


# A GPU of 2024 with a 400 Gbit/s link, as in `plan/costs.py`.
ASSUMED = Machine(link_gb_per_s=50.0, microseconds_per_peer=1.0, tflop_per_s=400.0)


class Case(NamedTuple):
    """What is planned: a model on a number of GPUs, the dtype of products, and the number of ranks in a team."""

    model: str
    gpus: int
    dtype: str
    team: int = 1

    def __str__(self) -> str:
        return f"{self.model} on {self.gpus:,} ranks, {self.products}"

    @property
    def products(self) -> str:
        """How products are made, in the words of the tables."""
        return self.dtype if self.team == 1 else f"{self.dtype}, teams of {self.team}"


class Planned:
    """The plans of a case, as seen by the ranks that work together with rank 0."""

    def __init__(self, kernel: ModuleType, case: Case, chunk_bytes: int | None = None):
        self._kernel = kernel
        self.gpus, self._wire, self._chunk_bytes = case.gpus, WIRE[case.dtype], chunk_bytes
        self.itemsizes = tuple(each.itemsize for each in self._wire)
        self.matrices = list(self._matrices(MODELS[case.model]))
        alone = [matrix for matrix in self.matrices if matrix.has_owner]
        self.exchanged = kernel.plan.teams.with_teams(alone, case.team) if alone else []
        self.local = [matrix for matrix in self.matrices if not matrix.has_owner]
        self.ranks = min((ranks for ranks, _ in self.exchanges(0)), key=len, default=tuple(range(self.gpus)))

    def exchanges(self, rank: int) -> list[tuple]:
        """Return the ranks and matrices of each exchange of `rank`."""
        groups = self._kernel.plan.exchanges.replica_groups
        return list(groups(self.exchanged, rank).items()) if self.exchanged else []

    def turns(self, counts: Iterable[int]) -> list[tuple[str, int]]:
        """Return the stages of the chunks of each exchange, in the order in which a rank reaches them."""
        order: list[tuple[str, int]] = []

        def chunk(number: int) -> Iterator[None]:
            order.append(("gather", number))
            yield
            order.append(("scatter", number))
            yield
            order.append(("descend", number))

        number = itertools.count()
        exchanges = [[chunk(next(number)) for _ in range(count)] for count in counts]
        rounds = self._kernel.step.pipeline.advanced(exchanges, IN_FLIGHT)
        next(rounds, None)
        order.append(("local", 0))
        for _ in rounds:
            pass
        return order

    def sent_bytes(self, messages, position: int) -> int:
        """Return the bytes that a rank sends to others for a chunk, there and back."""
        return messages.sent_bytes(position, *self.itemsizes)

    def held_bytes(self, chunks: Sequence[tuple]) -> int:
        """Return the bytes of the buffers of those chunks of one exchange that are under way together."""
        sizes = [messages.buffer_bytes(*self.itemsizes) for messages, _ in chunks]
        return max(sum(sizes[i : i + IN_FLIGHT + 1]) for i in range(len(sizes)))

    def chunks(self, rank: int) -> list[list[tuple]]:
        """Return one rank's side of the chunks of each exchange, with its position among the exchanging ranks."""
        plan, sides = self._kernel.plan, []
        for ranks, some in self.exchanges(rank):
            limit = plan.exchanges.chunk_elements(some, ranks, self._chunk_bytes)
            sides.append((ranks, plan.messages.plan_messages(some, ranks, rank, limit)[0]))
        return [[(messages, ranks.index(rank)) for messages in chunks] for ranks, chunks in sides]

    def flop(self, matrix) -> int:
        """Return the FLOPs of one step of a matrix for each rank that works on it, including what a team sends."""
        costs = self._kernel.plan.costs
        if matrix.team_size == 1:
            return costs.standard_step_flops(matrix.rows, matrix.cols)
        return (matrix.cost - costs.FLOPS_OF_AN_ELEMENT * matrix.rows * matrix.cols) // STEPS

    def workers(self, matrix, owner: int) -> Sequence[int]:
        """Return the ranks that work on a matrix with its owner."""
        first = owner - owner % matrix.team_size
        return range(first, first + matrix.team_size)

    def share(self, matrix) -> float:
        """Return the share of the cooperating ranks that hold a part of a matrix."""
        return len(matrix.holders) / len(matrix.shards.layout.mesh.ranks)

    def _matrices(self, weights: Sequence[Weights]) -> Iterator:
        """Yield the records of all matrices, each with its cost to its owner."""
        plan, number = self._kernel.plan, 0
        self._schedule = self._kernel.schedules.resolve_schedule("polar_express", STEPS)
        for kind in weights:
            experts, p = len(kind.shape) == 3, torch.empty(kind.shape, device="meta")
            view = self._kernel.parameters.matrices.matrix_view(kind.name, p, stacked=experts)
            shards = plan.shards.shards_of(view, self._layout(kind.shape))
            for _ in range(kind.count):
                packed, work = self._wire
                parameter = SimpleNamespace(number=number, name=kind.name, packed_dtype=packed, work_dtype=work)
                vars(parameter).update(schedule=self._schedule, sharers=range(self.gpus), device=torch.device("cpu"))
                parameter.circumstances = self._kernel.kernels.circumstances.ALONE
                parameter.equalization = self._kernel.rules.equalization.Equalization()
                vars(parameter).update(
                    update_dtype=work, keeps_norm=False, moments_view=None, moments_dtype=torch.float32
                )
                for index, (rows, cols) in enumerate(view.shapes):
                    cost = plan.costs.owners_cost(rows, cols, STEPS)
                    yield plan.matrix.Matrix(parameter, index, rows, cols, 1.0, None, shards, cost)
                number += 1

    def _layout(self, shape: tuple[int, ...]):
        """Return FSDP2's layout, with copies if there are many GPUs. Each expert is on a share of all ranks."""
        layouts = self._kernel.plan.layout
        if len(shape) == 3:
            sizes, splits = (max(self.gpus // EXPERT_RANKS, 1), min(EXPERT_RANKS, self.gpus)), ((1, 1), (0, 1))
        else:
            shards = min(self.gpus, SHARDS)
            sizes, splits = (self.gpus // shards, shards), (None, (0, 1))
        return layouts.Layout(shape, layouts.mesh_of(sizes, tuple(range(self.gpus))), splits)
