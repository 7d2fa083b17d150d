"""What a plan costs, and what other schemes would cost: bytes, FLOPs, memory and predicted seconds.

Bytes, messages, FLOPs and imbalance come from real plans. Seconds come from a model and are not measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType

import numpy as np

from tools.scale.models import MODELS, Weights
from tools.scale.plans import STEPS, Case, Machine, Planned

TOKENS = 4_000_000  # of a training step


@dataclass(frozen=True)
class Row:
    """A model on a number of GPUs. Bytes and FLOPs are those of the rank that has most among the examined ones."""

    model: str
    gpus: int
    dtype: str  # of the products
    team: int  # ranks that may work on one matrix
    matrices: int
    chunks: int
    sent_bytes: int
    flop: int  # of all steps
    imbalance: float  # of FLOPs, the largest to the mean
    held_bytes: int  # in the buffers of the chunks under way
    seconds: dict[str, float]  # of a step's exchanges and products, by scheme
    seconds_of_largest: float  # for the products of the largest exchanged matrix
    training_seconds: float  # of the forward and backward pass


def plan(kernel: ModuleType, case: Case, machine: Machine, chunk_bytes: int | None = None, sample: int = 4) -> Row:
    """Return the row of a case, from the ranks with the largest loads and `sample` others."""
    weights, gpus = MODELS[case.model], case.gpus
    planned = Planned(kernel, case, chunk_bytes)
    flop = {matrix.key: planned.flop(matrix) for matrix in [*planned.exchanged, *planned.local]}
    local = sum(planned.flop(matrix) * len(matrix.holders) for matrix in planned.local) / gpus
    ranks = sorted({*planned.ranks[:: max(len(planned.ranks) // sample, 1)], planned.ranks[-1]})
    exchanges = {rank: planned.chunks(rank) for rank in ranks}
    turns = planned.turns(map(len, exchanges[ranks[0]]))
    sides = {rank: list(itertools.chain(*chunks)) for rank, chunks in exchanges.items()}
    loads = [_loads(planned, _owners(chunk), flop) for chunk, _ in sides[ranks[0]]]  # all ranks have the same owners
    total = [local + sum(load.get(rank, 0) for load in loads) for rank in planned.ranks]
    largest = max((flop[matrix.key] for matrix in planned.exchanged), default=0)
    return Row(
        **case._asdict(),
        matrices=len(planned.matrices),
        chunks=len(loads),
        sent_bytes=max(sum(planned.sent_bytes(*each) for each in side) for side in sides.values()),
        flop=int(STEPS * max(total)),
        imbalance=max(total) * len(total) / max(sum(total), 1),
        held_bytes=max((planned.held_bytes(some) for chunks in exchanges.values() for some in chunks), default=0),
        seconds={
            "in chunks": _pipelined(turns, planned, sides, loads, machine, local),
            "at best": _with_owners(planned, _planned_owners(planned, sides[ranks[0]]), flop, machine, local),
            **{name: scheme(planned, flop, machine, local) for name, scheme in RIVALS.items()},
        },
        seconds_of_largest=machine.products(largest),
        training_seconds=training_flop(weights) / (1e12 * machine.tflop_per_s * gpus),
    )


def training_flop(weights: Sequence[Weights]) -> float:
    """Return the FLOPs of a batch: two forward and four backward per parameter and token."""
    return 6 * TOKENS * sum(kind.parameters * kind.used for kind in weights)


def _pipelined(turns, planned: Planned, sides, loads, machine: Machine, local: float) -> float:
    """Return the seconds of a step whose chunks take turns as in the optimizer.

    A message starts when the last rank has reached it and the previous message has ended. It ends for all ranks at
    once.
    """
    position = {rank: i for i, rank in enumerate(planned.ranks)}
    free, link, ended = np.zeros(len(position)), 0.0, {}
    for stage, number in turns:
        if stage == "local":
            free += machine.products(local)
            continue
        if stage != "gather":
            free = np.maximum(free, ended[number])
        if stage == "scatter":
            for rank in loads[number].keys() & position.keys():
                free[position[rank]] += machine.products(loads[number][rank])
        if stage != "descend":
            link = max(link, free.max()) + _seconds(planned, sides, number, stage, machine)
            ended[number] = link
    return float(free.max())


def _seconds(planned: Planned, sides, number: int, way: str, machine: Machine) -> float:
    sent = [_others(_stages(side[number][0])[way], side[number][1]) for side in sides.values()]
    peers = max(sum(amount > 0 for amount in amounts) for amounts in sent)  # empty messages do not count
    itemsize = planned.itemsizes[way == "scatter"]
    return machine.exchange(itemsize * max(map(sum, sent)), peers)


def _owners(messages) -> list[tuple]:
    return [(each.matrix, each.owner) for each in messages.assignments]


def _planned_owners(planned: Planned, side: Sequence) -> list[tuple]:
    owners = {matrix.key: owner for chunk, _ in side for matrix, owner in _owners(chunk)}
    return [(matrix, owners[matrix.key]) for _, matrices in planned.exchanges(planned.ranks[0]) for matrix in matrices]


def _round_robin(planned: Planned, flop, machine: Machine, local: float) -> float:
    """The same messages, but owners take turns in the order of the parameters, whatever these cost."""
    owners = list(_in_turn(planned.exchanged, attrgetter("holders")))
    return _with_owners(planned, owners, flop, machine, local)


def _replicas_repeat(planned: Planned, flop, machine: Machine, local: float) -> float:
    """All-to-all among the parts of one copy, while every copy does the same. Owners take turns, largest first."""

    def parts(matrix) -> Sequence[int]:
        layout, holders = matrix.shards.layout, matrix.holders
        first = layout.copy_of(holders[0])
        return [rank for rank in holders if layout.copy_of(rank) == first]

    matrices = sorted(planned.exchanged, key=lambda matrix: -flop[matrix.key])
    return _with_owners(planned, list(_in_turn(matrices, parts)), flop, machine, local, repeated=True)


def _gather_everything(planned: Planned, flop, machine: Machine, local: float) -> float:
    """Each rank gathers every matrix of which it has a part, and works on all of them."""
    work = local + sum(flop[matrix.key] * len(matrix.holders) for matrix in planned.exchanged) / planned.gpus
    sent = sum(size_of(matrix) * (1 - 1 / matrix.parts) * len(matrix.holders) for matrix in planned.exchanged)
    peers = max((matrix.parts for matrix in planned.exchanged), default=1) - 1
    return max(machine.exchange(planned.itemsizes[0] * sent / planned.gpus, peers), machine.products(work))


RIVALS = {
    "round robin": _round_robin,
    "replicas repeat": _replicas_repeat,
    "gather everything": _gather_everything,
}


def _in_turn(matrices: Iterable, candidates) -> Iterator[tuple]:
    """Yield matrices and their owners; the ranks that may own a matrix take turns."""
    turns: dict[int, int] = {}
    choices: dict[tuple, Sequence[int]] = {}
    for matrix in matrices:
        key = id(matrix.shards), matrix.index  # all matrices of one kind of weights have the same ranks
        if key not in choices:
            choices[key] = candidates(matrix)
        ranks = choices[key]
        turn = turns[ranks[0]] = turns.get(ranks[0], -1) + 1
        yield matrix, ranks[turn % len(ranks)]


def _with_owners(planned: Planned, owners, flop, machine: Machine, local: float, repeated: bool = False) -> float:
    """Return the seconds of the busiest rank in both exchanges or of the busiest in products, whichever is more."""
    loads = dict.fromkeys(range(planned.gpus), local)
    sent = dict.fromkeys(range(planned.gpus), 0.0)
    for matrix, owner in owners:
        for rank in planned.workers(matrix, owner):
            loads[rank] += flop[matrix.key]
        sent[owner] += size_of(matrix) * ((1 if repeated else matrix.shards.copies) - 1 / matrix.parts)
    # To the owners: each copy sends to its own owner, or all copies together to one.
    gathered = sum(
        size_of(matrix) / matrix.parts * (1 if repeated else 1 / matrix.shards.copies) * planned.share(matrix)
        for matrix, _ in owners
    )
    peers = max((u.parts if repeated else len(u.holders) for u, _ in owners), default=1) - 1
    packed, work = planned.itemsizes
    busiest = work * max(sent.values()) + packed * gathered
    return max(machine.exchange(busiest, 2 * peers), machine.products(max(loads.values())))


def size_of(matrix) -> int:
    """Return the elements of a whole matrix."""
    return matrix.rows * matrix.cols


def _loads(planned: Planned, owners: Iterable, flop: dict) -> dict[int, int]:
    loads: dict[int, int] = {}
    for matrix, owner in owners:
        for rank in planned.workers(matrix, owner):
            loads[rank] = loads.get(rank, 0) + flop[matrix.key]
    return loads


def _stages(messages) -> dict[str, Sequence[int]]:
    """Return the number of elements that go to each rank in the two exchanges."""
    return {"gather": messages.holder.sent, "scatter": messages.owner.sent}


def _others(sent: Sequence[int], position: int) -> list[int]:
    """Return the lengths of the messages to other ranks."""
    return [*sent[:position], *sent[position + 1 :]]
