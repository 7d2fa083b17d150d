"""Plans of large models on many GPUs, as a step would follow them, and the model of links and GPUs that judges them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from tools.scale.models import Weights

BYTES = 2  # of an element on the wire, both ways, as with ns_dtype="bfloat16"
STEPS = 5  # of the iteration
IN_FLIGHT = 2  # chunks that fly while another one is worked on
EXPERT_RANKS = 64  # among which the experts of a layer are split
SHARDS = 256  # of a parameter that is no expert; further GPUs hold copies (HSDP)


@dataclass(frozen=True)
class Machine:
    """What seconds follow from: a collective takes its bytes over the link and a latency for each other rank."""

    link_gb_per_s: float  # of each GPU, in one direction
    microseconds_per_peer: float
    tflop_per_s: float  # of the products

    def exchange(self, sent: float, peers: int) -> float:
        """Return the seconds of a collective in which a rank sends so many bytes."""
        return sent / (1e9 * self.link_gb_per_s) + 1e-6 * self.microseconds_per_peer * peers

    def products(self, flop: float) -> float:
        """Return the seconds of all steps of matrices, of which one step costs `flop`."""
        return STEPS * flop / (1e12 * self.tflop_per_s)


class Planned:
    """The plans of a model on so many GPUs, as the ranks see them that work together with rank 0."""

    def __init__(self, kernel: ModuleType, weights: Sequence[Weights], gpus: int, chunk_bytes: int):
        self._distributed, self._matrices = kernel.distributed, kernel.matrices
        self.gpus, self.limit = gpus, chunk_bytes // BYTES
        self.every = list(self._units(weights))
        is_exchanged = self._distributed.exchange_plan.is_exchanged
        self.units = [unit for unit in self.every if is_exchanged(unit.shards, unit.matrix.index)]
        sent = set(map(id, self.units))
        self.local = [unit for unit in self.every if id(unit) not in sent]
        self.ranks = min((ranks for ranks, _ in self.exchanges(0)), key=len, default=tuple(range(gpus)))

    def exchanges(self, rank: int) -> list[tuple]:
        """Return the ranks and units of each exchange of `rank`."""
        return list(self._distributed.exchange_plan.among_useful_copies(self.units, rank).items()) if self.units else []

    def turns(self, counts: Iterable[int]) -> list[tuple[str, int]]:
        """Return the stages of so many chunks of each exchange, in the order in which a rank comes to them."""
        order: list[tuple[str, int]] = []

        def chunk(number: int) -> Iterator[None]:
            order.append(("gather", number))
            yield
            order.append(("scatter", number))
            yield
            order.append(("descend", number))

        number = itertools.count()
        exchanges = [[chunk(next(number)) for _ in range(count)] for count in counts]
        self._distributed.pipeline.run_pipeline(exchanges, IN_FLIGHT, lambda: order.append(("local", 0)))
        return order

    def buffer_bytes(self, chunk) -> int:
        """Return what the buffers of a chunk take."""
        return self._distributed.exchange_plan.buffer_bytes(chunk, BYTES, BYTES)

    def chunks(self, rank: int) -> list[list[tuple]]:
        """Return one rank's side of the chunks of each exchange, with its position among those who exchange them."""
        plan_chunks = self._distributed.messages.plan_chunks
        sides = [(ranks, plan_chunks(units, ranks, rank, self.limit)[0]) for ranks, units in self.exchanges(rank)]
        return [[(chunk, ranks.index(rank)) for chunk in chunks] for ranks, chunks in sides]

    def flop(self, unit) -> int:
        """Return the FLOPs of one step of a matrix."""
        return self._distributed.exchange_plan.flops(*unit.shards.view.shapes[unit.matrix.index])

    def holders(self, unit) -> Sequence[int]:
        """Return the ranks that have something of a matrix."""
        return unit.shards.holders(unit.matrix.index)

    def copies(self, unit) -> int:
        return unit.shards.layout.copies

    def parts(self, unit) -> int:
        return len(self.holders(unit)) // self.copies(unit)

    def share(self, unit) -> float:
        """Return which share of the ranks that work together has something of a matrix."""
        return len(self.holders(unit)) / len(unit.shards.layout.mesh.ranks)

    def _units(self, weights: Sequence[Weights]) -> Iterator:
        own, number = self._distributed, 0
        for kind in weights:
            experts = len(kind.shape) == 3
            view = self._matrices.matrix_view(kind.name, torch.empty(kind.shape, device="meta"), experts=experts)
            shards = own.shards.Shards(view, self._layout(kind.shape))
            for _ in range(kind.count):
                matrices = (own.plan.Matrix(number, index) for index in range(len(view.shapes)))
                yield from (own.exchange_plan.unit_of(matrix, shards, STEPS) for matrix in matrices)
                number += 1

    def _layout(self, shape: tuple[int, ...]):
        """Return FSDP2's layout, with copies where there are many GPUs; of experts, each on a share of all ranks."""
        placement = self._distributed.placement
        if len(shape) == 3:
            sizes, splits = (max(self.gpus // EXPERT_RANKS, 1), min(EXPERT_RANKS, self.gpus)), ((1, 1), (0, 1))
        else:
            shards = min(self.gpus, SHARDS)
            sizes, splits = (self.gpus // shards, shards), (None, (0, 1))
        return placement.Layout(shape, placement.mesh_of(sizes, tuple(range(self.gpus))), splits)
