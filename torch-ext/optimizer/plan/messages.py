"""What each rank sends to whom, so that owners can orthogonalize whole matrices: integers only.

A message has the sender's parts of the receiver's matrices, in the order of the chunk, and then a flag for each part.
Its length follows from the plan alone, whatever gradients there are. For example, two ranks hold rows of A (4 x 2) and
of B (2 x 2); rank 0 owns A, rank 1 owns B. A0 are the 4 elements of A on rank 0, B1 the 2 of B on rank 1, and f a flag.
The buffers of rank 0, with the offset of each piece, where | stands between the messages of rank 0 and of rank 1:

    gather, sent         0: A0   4: f  |  5: B0   7: f         parts of what each rank owns
    gather, received     0: A0   4: f  |  5: A1   9: f         A is whole here: orthogonalize it
    scatter, sent        0: A0   4: f  |  5: A1   9: f         parts of A's update
    scatter, received    0: A0   4: f  |  5: B0   7: f         updates of what this rank holds

In the gather a flag is 1 if the sender had a gradient, else 0. In the scatter it is 1 if any rank had one, 0 if none
had, and -1 if of two copies of a part only one had. Each rank makes its own side of the plan, from what all know.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

from .matrix import Matrix
from .owners import Owners, chunks_by_size
from .process_groups import Ranks
from .shards import Part

# A part of one of the owned matrices of a chunk, by its position among them, and the part's place in a buffer.
PartPlace = tuple[int, Part, int]


class HolderSide(NamedTuple):
    """What a rank does for the parts that it holds. Places are elements in the buffer that is sent or received.

    If several ranks hold copies of a part, only the rank in the owner's copy sends it. The others write their direction
    to scratch memory behind the outgoing messages.
    """

    sent: tuple[int, ...]  # elements of the message to each rank, in the gather
    received: tuple[int, ...]  # from each rank, in the scatter
    scratch: int
    matrices: tuple[Matrix, ...]  # of the parts, in the order of the chunk; what follows has an entry for each
    direction_places: tuple[int, ...]
    update_places: tuple[int, ...]
    presence_places: tuple[int, ...]  # of the flag that is sent
    verdict_places: tuple[int, ...]  # of the flag that comes back


class OwnerSide(NamedTuple):
    """What a rank does for the matrices that it owns."""

    received: tuple[int, ...]  # elements of the message from each rank, in the gather
    sent: tuple[int, ...]  # to each rank, in the scatter
    matrices: tuple[Matrix, ...]
    parts_in: tuple[PartPlace, ...]
    parts_out: tuple[PartPlace, ...]
    presence_places: tuple[tuple[int, int, int], ...]  # matrix, place of the flag and of another copy's
    verdict_places: tuple[tuple[int, int], ...]  # matrix and place, for each flag that is sent


class Messages(NamedTuple):
    """One rank's side of the matrices that are exchanged together, and who owns each of them, by rank."""

    holder: HolderSide
    owner: OwnerSide
    owners: tuple[tuple[Matrix, int], ...]

    def sent_bytes(self, position: int, packed: int, work: int) -> int:
        """Return what goes to other ranks in both exchanges from the rank at this position among them."""
        gather, scatter = (sum(sent) - sent[position] for sent in (self.holder.sent, self.owner.sent))
        return gather * packed + scatter * work

    def buffer_bytes(self, packed: int, work: int) -> int:
        """Return what the buffers take at most: while they are gathered, worked on by owners, or come back.

        `packed` and `work` are the bytes of an element on the way to the owners and back.
        """
        received, returned = sum(self.owner.received), sum(self.owner.sent)
        return max(
            (sum(self.holder.sent) + self.holder.scratch + received) * packed,
            received * packed + returned * work,
            (returned + sum(self.holder.received)) * work,
        )


def plan_messages(
    matrices: Sequence[Matrix], ranks: Ranks, rank: int, limit: int
) -> tuple[tuple[Messages, ...], tuple[int, ...]]:
    """Return this `rank`'s side of the chunks in which `matrices` are exchanged among `ranks`, and each rank's load.

    A chunk has matrices of which a rank holds at most `limit` elements, or as many as there are parts of one, so that
    no owner idles. Owners are all ranks that hold a copy or a part; loads are costs, of all chunks together.
    """
    owners = Owners(len(ranks))
    where = {r: i for i, r in enumerate(ranks)}
    chunks = []
    for positions in chunks_by_size(matrices, ranks, limit):
        owners.next_chunk()
        members = [matrices[i] for i in positions]
        taken = [ranks[owners.take(matrix.cost, _candidates(matrix, where))] for matrix in members]
        owned = [matrix for matrix, owner in zip(members, taken) if owner == rank]
        holder = _holder_side(members, taken, ranks, rank)
        chunks.append(Messages(holder, _owner_side(owned, ranks, rank), tuple(zip(members, taken))))
    return tuple(chunks), tuple(owners.loads)


def _candidates(matrix: Matrix, where: dict[int, int]) -> Optional[list[int]]:
    """Return the positions of those who may own a matrix; None for all, as where only some experts are on a rank."""
    holders = matrix.holders
    return None if len(holders) == len(where) else [where[rank] for rank in holders]


def _holder_side(matrices: Sequence[Matrix], owners: Sequence[int], ranks: Ranks, rank: int) -> HolderSide:
    sizes = [matrix.part(rank).size for matrix in matrices]
    sources = [_same_copy(matrix, rank, owner) for matrix, owner in zip(matrices, owners)]
    entries = [(owner, size if source else 0, size > 0) for owner, size, source in zip(owners, sizes, sources)]
    sent, places_out, flags_out = _lay_out(ranks, entries)
    received, places_in, flags_in = _lay_out(ranks, [(owner, size, size > 0) for owner, size in zip(owners, sizes)])
    held = [i for i, size in enumerate(sizes) if size]
    behind, directions = sum(sent), []
    for i in held:
        directions.append(places_out[i] if sources[i] else behind)
        behind += 0 if sources[i] else sizes[i]
    return HolderSide(
        sent=sent,
        received=received,
        scratch=behind - sum(sent),
        matrices=tuple(matrices[i] for i in held),
        direction_places=tuple(directions),
        update_places=tuple(places_in[i] for i in held),
        presence_places=tuple(flags_out[i] for i in held),
        verdict_places=tuple(flags_in[i] for i in held),
    )


def _owner_side(owned: Sequence[Matrix], ranks: Ranks, rank: int) -> OwnerSide:
    senders = [(r, i, matrix.part(r)) for r in ranks for i, matrix in enumerate(owned)]
    sources = [_same_copy(owned[i], r, rank) for r, i, _ in senders]
    entries = [(r, part.size if source else 0, part.size > 0) for (r, _, part), source in zip(senders, sources)]
    received, places_in, flags_in = _lay_out(ranks, entries)
    sent, places_out, flags_out = _lay_out(ranks, [(r, part.size, part.size > 0) for r, _, part in senders])
    some = [k for k, (_, _, part) in enumerate(senders) if part.size]
    first: dict[tuple[int, Part], int] = {}  # of the copies of a part
    twins = [first.setdefault(senders[k][1:], k) for k in some]
    return OwnerSide(
        received=received,
        sent=sent,
        matrices=tuple(owned),
        parts_in=tuple((*senders[k][1:], places_in[k]) for k in some if sources[k]),
        parts_out=tuple((*senders[k][1:], places_out[k]) for k in some),
        presence_places=tuple((senders[k][1], flags_in[k], flags_in[twin]) for k, twin in zip(some, twins)),
        verdict_places=tuple((senders[k][1], flags_out[k]) for k in some),
    )


def _same_copy(matrix: Matrix, rank: int, owner: int) -> bool:
    """Whether `rank` has its part from the copy of the tensor that the owner has one from."""
    layout = matrix.shards.layout
    return layout.copy_of(rank) == layout.copy_of(owner)


def _lay_out(ranks: Ranks, entries: Sequence[tuple[int, int, bool]]) -> tuple[tuple[int, ...], list[int], list[int]]:
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
