"""Who orthogonalizes which sharded matrix, and what each rank sends to whom for it: integers only.

A message has the sender's parts of the receiver's matrices, in the order of the chunk, and then a flag for each of
them: on the way to an owner 1 if the sender had a gradient, else 0; on the way back 1 if anybody had one, 0 if nobody
had, and -1 if of two copies only one had. Its length follows from the plan alone. Each rank makes its own side of the
plan, from what all of them know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional, Sequence

from ..partition import Item, Owners, chunks_by_size
from .plan import Matrix
from .shards import Part, Shards


class Unit(NamedTuple):
    """One sharded matrix, and what it costs its owner."""

    matrix: Matrix
    shards: Shards
    cost: int

    @property
    def size(self) -> int:
        """How many elements a rank that holds a part of the matrix has of it, or one with the largest part."""
        rows, cols = self.shards.view.shapes[self.matrix.index]
        return -(-rows * cols // self.parts)

    @property
    def parts(self) -> int:
        """In how many parts each copy of the matrix lies."""
        return len(self.holders) // self.shards.layout.copies

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that have something of the matrix."""
        return self.shards.holders(self.matrix.index)


class Block(NamedTuple):
    """A part of a matrix and its place in a buffer; `matrix` counts the owned ones of a chunk."""

    matrix: int
    part: Part
    offset: int


class Side(NamedTuple):
    """One rank's messages of one exchange: elements sent to and received from each rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """One rank's side of the matrices that are exchanged together. Places are elements in the buffer of an exchange.

    Held are the parts that the rank has, in the order of the chunk: `gathered` is where each one's direction goes,
    `scattered` where its update comes. Copies of a part whose owner has another source lie behind what is sent.
    """

    owned: tuple[Matrix, ...]
    gather: Side
    scatter: Side
    held: tuple[Matrix, ...]
    gathered: tuple[int, ...]
    scattered: tuple[int, ...]
    presence: tuple[int, ...]  # of the flag of each held part
    verdicts: tuple[int, ...]  # of the one that comes back
    blocks_in: tuple[Block, ...]
    blocks_out: tuple[Block, ...]
    presence_in: tuple[tuple[int, int, int], ...]  # owned matrix, place, another copy's place, of each flag that comes
    verdicts_out: tuple[tuple[int, int], ...]
    scratch: int  # elements behind what is sent
    owners: tuple[tuple[Matrix, int], ...]  # of all matrices of the chunk, by rank


def plan_chunks(
    units: Sequence[Unit], ranks: Sequence[int], rank: int, limit: int
) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
    """Return this `rank`'s side of the chunks in which `units` are exchanged among `ranks`, and the load of each rank.

    `ranks` are in rising order. A chunk has units of which a rank holds at most `limit` elements, or as many as there
    are parts of one, so that no owner idles. Owners are all ranks that hold a copy or a part; loads are costs, of all
    chunks together.
    """
    owners = Owners(len(ranks))
    where = {r: i for i, r in enumerate(ranks)}
    chunks = []
    for positions in chunks_by_size([_item(unit, len(ranks)) for unit in units], limit):
        owners.next_chunk()
        own = [units[i] for i in positions]
        taken = [ranks[owners.take(unit.cost, _candidates(unit, where))] for unit in own]
        chunks.append(_side(own, taken, ranks, rank))
    return tuple(chunks), tuple(owners.loads)


def _item(unit: Unit, ranks: int) -> Item:
    holders = unit.holders
    return Item(unit.cost, unit.size, unit.parts, None if len(holders) == ranks else holders)


def _candidates(unit: Unit, where: dict[int, int]) -> Optional[list[int]]:
    """Return the positions of those who may own a unit; None for all, as where only some experts are on a rank."""
    return None if len(unit.holders) == len(where) else [where[rank] for rank in unit.holders]


def _side(units: Sequence[Unit], owners: Sequence[int], ranks: Sequence[int], rank: int) -> Chunk:
    sent, back, held = _as_holder(units, owners, ranks, rank)
    mine = [unit for unit, owner in zip(units, owners) if owner == rank]
    received, returned, owned = _as_owner(mine, ranks, rank)
    return Chunk(
        gather=Side(sent, received),
        scatter=Side(returned, back),
        owners=tuple((unit.matrix, owner) for unit, owner in zip(units, owners)),
        **held,
        **owned,
    )


def _as_holder(units: Sequence[Unit], owners: Sequence[int], ranks: Sequence[int], rank: int) -> tuple:
    """Return what `rank` sends to the owners of its parts and gets back, in elements, and the places of the parts."""
    parts = [unit.shards.part(unit.matrix.index, rank) for unit in units]
    sizes = [part.size for part in parts]
    sources = [_same_copy(unit, rank, owner) for unit, owner in zip(units, owners)]
    there = [(owner, size if source else 0, size > 0) for owner, size, source in zip(owners, sizes, sources)]
    sent, gathered, presence = _lay_out(ranks, there)
    received, scattered, verdicts = _lay_out(ranks, [(owner, size, size > 0) for owner, size in zip(owners, sizes)])
    held = [i for i, size in enumerate(sizes) if size]
    scratch, places = 0, []
    for i in held:
        places.append(gathered[i] if sources[i] else sum(sent) + scratch)
        scratch += 0 if sources[i] else sizes[i]
    return (
        sent,
        received,
        dict(
            held=tuple(units[i].matrix for i in held),
            gathered=tuple(places),
            scattered=tuple(scattered[i] for i in held),
            presence=tuple(presence[i] for i in held),
            verdicts=tuple(verdicts[i] for i in held),
            scratch=scratch,
        ),
    )


def _as_owner(mine: Sequence[Unit], ranks: Sequence[int], rank: int) -> tuple:
    """Return what `rank` gets from those who hold parts of its matrices and returns, and the places of the parts."""
    theirs = [(r, i, unit.shards.part(unit.matrix.index, r)) for r in ranks for i, unit in enumerate(mine)]
    sources = [_same_copy(mine[i], r, rank) for r, i, _ in theirs]
    here = [(r, part.size if source else 0, part.size > 0) for (r, _, part), source in zip(theirs, sources)]
    received, places_in, flags_in = _lay_out(ranks, here)
    sent, places_out, flags_out = _lay_out(ranks, [(r, part.size, part.size > 0) for r, _, part in theirs])
    some = [k for k, (_, _, part) in enumerate(theirs) if part.size]
    first: dict[tuple[int, Part], int] = {}  # of the copies of a part
    twins = [first.setdefault(theirs[k][1:], k) for k in some]
    return (
        received,
        sent,
        dict(
            owned=tuple(unit.matrix for unit in mine),
            blocks_in=tuple(Block(*theirs[k][1:], places_in[k]) for k in some if sources[k]),
            blocks_out=tuple(Block(*theirs[k][1:], places_out[k]) for k in some),
            presence_in=tuple((theirs[k][1], flags_in[k], flags_in[twin]) for k, twin in zip(some, twins)),
            verdicts_out=tuple((theirs[k][1], flags_out[k]) for k in some),
        ),
    )


def _same_copy(unit: Unit, rank: int, owner: int) -> bool:
    """Whether `rank` has its part from the copy of the tensor that the owner has one from."""
    layout = unit.shards.layout
    return layout.copy_of(rank) == layout.copy_of(owner)


def _lay_out(
    ranks: Sequence[int], entries: Sequence[tuple[int, int, bool]]
) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Return how long the message of each rank is, and the places of each entry's elements and of its flag.

    Entries are (rank, elements, whether it has a flag), in the order in which they are in their message.
    """
    elements, flags = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    for rank, size, flag in entries:
        elements[rank] += size
        flags[rank] += flag
    starts, total = {}, 0
    for rank in ranks:
        starts[rank], total = total, total + elements[rank] + flags[rank]
    next_flag = {rank: starts[rank] + elements[rank] for rank in ranks}
    places, flag_places = [], []
    for rank, size, flag in entries:
        places.append(starts[rank])
        starts[rank] += size
        flag_places.append(next_flag[rank])
        next_flag[rank] += flag
    return tuple(elements[rank] + flags[rank] for rank in ranks), places, flag_places
