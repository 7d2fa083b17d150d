"""Plans of large models on many GPUs, without any of them, and what a stated model of links and GPUs makes of them.

Bytes, messages, FLOPs and imbalance are those of the real plans. Seconds are a model's, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from scale_models import MODELS, Weights

BYTES = 2  # of an element on the wire, half precision
STEPS = 5  # of the iteration
DEPTH = 2  # chunks in flight
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


@dataclass(frozen=True)
class Row:
    """A model on a number of GPUs; bytes and FLOPs of the rank that has most, of those looked at."""

    model: str
    gpus: int
    matrices: int
    chunks: int
    messages: int
    sent_bytes: int
    flop: int  # of all steps
    imbalance: float  # of FLOPs, the largest to the mean
    bytes_in_flight: int
    seconds: dict[str, float]  # of a step's exchanges and products, by scheme


class Planned:
    """The plans of a model on so many GPUs."""

    def __init__(self, kernel: ModuleType, weights: Sequence[Weights], gpus: int, chunk_bytes: int):
        self._distributed, self._matrices = kernel.distributed, kernel.matrices
        self.gpus, self.ranks = gpus, tuple(range(gpus))
        every = list(self._units(weights))
        is_exchanged = self._distributed.exchange_plan.is_exchanged
        self.units = [unit for unit in every if is_exchanged(unit.shards, unit.matrix.index)]
        sent = set(map(id, self.units))
        self.local = [unit for unit in every if id(unit) not in sent]
        self.every = every
        self.limit = chunk_bytes // BYTES

    def chunks(self, rank: int):
        """Return one rank's side of all chunks."""
        if not self.units:
            return ()
        return self._distributed.messages.plan_chunks(self.units, self.ranks, rank, self.limit)[0]

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

    def _units(self, weights: Sequence[Weights]) -> Iterator:
        own, number = self._distributed, 0
        for kind in weights:
            experts = len(kind.shape) == 3
            view = self._matrices.matrix_view(kind.name, torch.empty(kind.shape, device="meta"), experts=experts)
            shards = own.shards.Shards(view, self._layout(kind.shape))
            cost = own.exchange_plan.flops(*view.shapes[0])
            for _ in range(kind.count):
                matrices = (own.plan.Matrix(number, index) for index in range(len(view.shapes)))
                yield from (own.messages.Unit(matrix, shards, cost) for matrix in matrices)
                number += 1

    def _layout(self, shape: tuple[int, ...]):
        """Return FSDP2's layout, with copies where there are many GPUs; of experts, each on a share of all ranks."""
        placement = self._distributed.placement
        if len(shape) == 3:
            sizes, splits = (max(self.gpus // EXPERT_RANKS, 1), min(EXPERT_RANKS, self.gpus)), ((1, 1), (0, 1))
        else:
            shards = min(self.gpus, SHARDS)
            sizes, splits = (self.gpus // shards, shards), (None, (0, 1))
        return placement.Layout(shape, placement.mesh_of(sizes, self.ranks), splits)


def plan(kernel: ModuleType, model: str, gpus: int, machine: Machine, chunk_bytes: int, sample: int = 4) -> Row:
    """Return what the plan of a model on `gpus` says, of the ranks with the largest loads and `sample` others."""
    planned = Planned(kernel, MODELS[model], gpus, chunk_bytes)
    flop = {unit.matrix: planned.flop(unit) for unit in planned.every}
    local = sum(planned.flop(unit) * len(planned.holders(unit)) for unit in planned.local) / gpus
    ranks = sorted({*range(0, gpus, max(gpus // sample, 1)), gpus - 1})
    sides = {rank: planned.chunks(rank) for rank in ranks}
    loads = [_loads(chunk.owners, flop) for chunk in sides[ranks[0]]]  # all ranks have the same owners
    total = [local + sum(load.get(rank, 0) for load in loads) for rank in planned.ranks]
    sent = max(_sent(side, rank) for rank, side in sides.items())
    return Row(
        model=model,
        gpus=gpus,
        matrices=len(planned.every),
        chunks=len(loads),
        messages=2 * len(loads),
        sent_bytes=BYTES * sent,
        flop=int(STEPS * max(total)),
        imbalance=max(total) * gpus / max(sum(total), 1),
        bytes_in_flight=max(BYTES * 2 * _in_flight(chunk) for side in sides.values() for chunk in side) if loads else 0,
        seconds={
            "planned, in chunks": _pipelined(sides, loads, machine, gpus, local),
            "planned": _with_owners(planned, _planned_owners(planned, sides[ranks[0]]), flop, machine, local),
            **{name: scheme(planned, flop, machine, local) for name, scheme in RIVALS.items()},
        },
    )


def _pipelined(sides, loads, machine: Machine, gpus: int, local: float) -> float:
    """Return the seconds of a step in which each rank has up to DEPTH chunks under way.

    A rank begins to send a chunk when the one DEPTH before is done; an exchange ends for all at once, after the last
    has begun and all earlier ones have ended; a rank works on one chunk after the other.
    """
    free = np.full(gpus, machine.products(local))
    link, done = 0.0, [0.0] * DEPTH
    for i, load in enumerate(loads):
        link = max(link, done[-DEPTH]) + _seconds(sides, i, "gather", machine)
        work = np.zeros(gpus)
        work[list(load)] = [machine.products(flop) for flop in load.values()]
        free = np.where(work > 0, np.maximum(free, link) + work, free)
        scattered = _seconds(sides, i, "scatter", machine)
        done.append(max(done[-1], link, free[list(load)].max()) + scattered)
    return max(done[-1], free.max())


def _seconds(sides, chunk: int, way: str, machine: Machine) -> float:
    own = [(getattr(side[chunk], way), rank) for rank, side in sides.items()]
    peers = max(sum(amount > 0 for amount in side.sent) for side, _ in own)  # an empty message is none
    return machine.exchange(BYTES * max(_to_others(side, rank) for side, rank in own), peers)


def _planned_owners(planned: Planned, side: Sequence) -> list[tuple]:
    owners = dict(owner for chunk in side for owner in chunk.owners)
    return [(unit, owners[unit.matrix]) for unit in planned.units]


def _round_robin(planned: Planned, flop, machine: Machine, local: float) -> float:
    """The same messages, with owners in the order of the parameters, whatever they cost."""
    owners = list(_in_turn(planned, planned.units, planned.holders))
    return _with_owners(planned, owners, flop, machine, local)


def _replicas_repeat(planned: Planned, flop, machine: Machine, local: float) -> float:
    """All-to-all among the parts of one copy, while every copy does the same; owners in turn, largest first."""

    def parts(unit) -> Sequence[int]:
        layout, holders = unit.shards.layout, planned.holders(unit)
        first = layout.copy_of(holders[0])
        return [rank for rank in holders if layout.copy_of(rank) == first]

    units = sorted(planned.units, key=lambda unit: -flop[unit.matrix])
    return _with_owners(planned, list(_in_turn(planned, units, parts)), flop, machine, local, repeated=True)


def _gather_everything(planned: Planned, flop, machine: Machine, local: float) -> float:
    """Each rank gathers all that it has a part of, and works on all of it."""
    work = local + sum(flop[unit.matrix] * len(planned.holders(unit)) for unit in planned.units) / planned.gpus
    sent = sum(size_of(unit) * (1 - 1 / planned.parts(unit)) * len(planned.holders(unit)) for unit in planned.units)
    peers = max((planned.parts(unit) for unit in planned.units), default=1) - 1
    return max(machine.exchange(BYTES * sent / planned.gpus, peers), machine.products(work))


RIVALS = {
    "round robin": _round_robin,
    "replicas repeat": _replicas_repeat,
    "gather everything": _gather_everything,
}


def _in_turn(planned: Planned, units: Iterable, candidates) -> Iterator[tuple]:
    """Yield units and their owners, each of those who may own it in turn."""
    turns: dict[int, int] = {}
    found: dict[tuple, Sequence[int]] = {}
    for unit in units:
        key = id(unit.shards), unit.matrix.index  # of one kind of weights all have the same ranks
        if key not in found:
            found[key] = candidates(unit)
        ranks = found[key]
        turn = turns[ranks[0]] = turns.get(ranks[0], -1) + 1
        yield unit, ranks[turn % len(ranks)]


def _with_owners(planned: Planned, owners, flop, machine: Machine, local: float, repeated: bool = False) -> float:
    """Return the seconds of the busiest rank in both exchanges or of the busiest in products, whichever is more."""
    loads = dict.fromkeys(planned.ranks, local)
    sent = dict.fromkeys(planned.ranks, 0.0)
    for unit, owner in owners:
        loads[owner] += flop[unit.matrix]
        sent[owner] += size_of(unit) * ((1 if repeated else planned.copies(unit)) - 1 / planned.parts(unit))
    # To the owners: each copy to its own, or all together to one.
    gathered = sum(
        size_of(unit) / planned.parts(unit) * (1 if repeated else 1 / planned.copies(unit)) * len(planned.holders(unit))
        for unit, _ in owners
    )
    peers = max((planned.parts(u) if repeated else len(planned.holders(u)) for u, _ in owners), default=1) - 1
    busiest = max(sent.values()) + gathered / planned.gpus
    return max(machine.exchange(BYTES * busiest, 2 * peers), machine.products(max(loads.values())))


def size_of(unit) -> int:
    """Return the elements of a whole matrix."""
    return math.prod(unit.shards.view.shapes[unit.matrix.index])


def _loads(owners: Iterable, flop: dict) -> dict[int, int]:
    loads: dict[int, int] = {}
    for matrix, rank in owners:
        loads[rank] = loads.get(rank, 0) + flop[matrix]
    return loads


def _sent(side: Sequence, rank: int) -> int:
    return sum(_to_others(chunk.gather, rank) + _to_others(chunk.scatter, rank) for chunk in side)


def _to_others(side, rank: int) -> int:
    return sum(side.sent) - side.sent[rank]


def _in_flight(chunk) -> int:
    """Return the elements of a chunk's buffers: directions, what comes, the matrices, what goes back, updates."""
    gathered = sum(chunk.gather.received)
    return sum(chunk.gather.sent) + chunk.scratch + 2 * gathered + sum(chunk.scatter.sent) + sum(chunk.scatter.received)
