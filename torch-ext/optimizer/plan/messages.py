"""What each rank sends to whom, so that owners can orthogonalize whole matrices: integers only.

A message has the sender's parts of the receiver's matrices, in the order of the chunk, and then a flag for each part.
Its length follows from the plan alone, whichever gradients there are. Each part and each message begins at a multiple
of 16 bytes, because NCCL copies unaligned data byte by byte.

For example, two ranks hold rows of A (4 x 2) and of B (2 x 2), in float32; rank 0 owns A, rank 1 owns B. A0 stands for
the 4 elements of A on rank 0, B1 for the 2 of B on rank 1, f for a flag. These are rank 0's buffers with the offset of
each piece; | separates the message with rank 0 from the one with rank 1:

    gather, sent         0: A0   4: f  |  8: B0  10: f         parts of what each rank owns
    gather, received     0: A0   4: f  |  8: A1  12: f         A is whole here: orthogonalize it
    scatter, sent        0: A0   4: f  |  8: A1  12: f         parts of A's update
    scatter, received    0: A0   4: f  |  8: B0  10: f         updates of what this rank holds

If a part has second moments, they follow its elements, in their own dtype and again from a multiple of 16 bytes: the
current ones in the gather, the new ones in the scatter. In the gather the part's elements of the parameter come last,
if the update depends on them, as it does when norms are kept (Hyperball).

In the gather a flag is 1 if the sender had a gradient, else 0. In the scatter it is 1 if any rank had one, else 0.
`step/agreement.py` has made sure before that copies of a part have their gradients together. Each rank makes its own
side of the plan, from facts that all ranks know.
"""

from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence

from .matrix import Matrix
from .owners import Owners, chunks_by_size
from .process_groups import Ranks
from .shards import Part
from .teams import teams_among
from .ways import Way, lay_out, padded, ways

# A part of one of the owned matrices of a chunk: the matrix's position among them, the part, its place in a buffer.
PartPlace = tuple[int, Part, int]

# The second moments of a part: the part's number, their place in a buffer, and how many there are.
MomentsPlace = tuple[int, int, int]


class HolderSide(NamedTuple):
    """What a rank does for the parts that it holds. Places are elements in the buffer that is sent or received.

    Places of second moments are counted in second moments. If several ranks hold copies of a part, only the rank in the
    owner's copy sends it. The others write their direction to scratch memory behind the outgoing messages.
    """

    sent: tuple[int, ...]  # elements of the message to each rank, in the gather
    received: tuple[int, ...]  # elements of the message from each rank, in the scatter
    scratch: int
    matrices: tuple[Matrix, ...]  # of each part, in the order of the chunk
    direction_places: tuple[int, ...]  # of each part
    update_places: tuple[int, ...]  # of each part
    presence_places: tuple[tuple[int, int], ...]  # number of a part that is sent, and the place of its flag
    active_places: tuple[int, ...]  # of the flag that comes back for each part
    moments_out: tuple[MomentsPlace, ...]  # in the gather
    moments_in: tuple[MomentsPlace, ...]  # in the scatter
    weights_out: tuple[tuple[int, int], ...]  # number of a part that is sent, and the place of its parameter's elements


class OwnerSide(NamedTuple):
    """What a rank does for the matrices that it owns."""

    received: tuple[int, ...]  # elements of the message from each rank, in the gather
    sent: tuple[int, ...]  # elements of the message to each rank, in the scatter
    matrices: tuple[Matrix, ...]
    parts_in: tuple[PartPlace, ...]
    parts_out: tuple[PartPlace, ...]
    presence_places: tuple[tuple[int, int], ...]  # matrix and place of each flag that arrives
    active_places: tuple[tuple[int, int], ...]  # matrix and place of each flag that is sent
    moments_in: tuple[PartPlace, ...]  # parts of one row or one column; places are counted in second moments
    moments_out: tuple[PartPlace, ...]
    weights_in: tuple[PartPlace, ...]


class Messages(NamedTuple):
    """One rank's side of a set of matrices that are exchanged together, and the owner of each of them."""

    holder: HolderSide
    owner: OwnerSide
    owners: tuple[tuple[Matrix, int], ...]
    teams: tuple[tuple[Matrix, tuple[int, ...]], ...]  # this rank's teams: the matrix, and the ranks, owner first

    def sent_bytes(self, position: int, packed: int, work: int) -> int:
        """Return the bytes sent to other ranks in both exchanges by the rank at `position` among them."""
        gather, scatter = (sum(sent) - sent[position] for sent in (self.holder.sent, self.owner.sent))
        return gather * packed + scatter * work

    def buffer_bytes(self, packed: int, work: int) -> int:
        """Return the most bytes that the buffers take: during the gather, the owners' work or the scatter.

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

    Of a chunk a rank holds at most `limit` elements, or, if that is more, one matrix for each part, so that no owner
    idles. Every rank that holds a copy or a part may become an owner. Loads are costs, of all chunks together.
    """
    owners = Owners(len(ranks))
    where = {r: i for i, r in enumerate(ranks)}
    chunks = []
    for positions in chunks_by_size(matrices, ranks, limit):
        owners.next_chunk()
        members = [matrices[i] for i in positions]
        workers = [_workers(owners, matrix, ranks, where) for matrix in members]
        taken = [some[0] for some in workers]
        owned = [matrix for matrix, owner in zip(members, taken) if owner == rank]
        holder = _holder_side(members, taken, ranks, rank)
        teams = tuple((m, some) for m, some in zip(members, workers) if len(some) > 1 and rank in some)
        chunks.append(Messages(holder, _owner_side(owned, ranks, rank), tuple(zip(members, taken)), teams))
    return tuple(chunks), tuple(owners.loads)


def _workers(owners: Owners, matrix: Matrix, ranks: Ranks, where: dict[int, int]) -> tuple[int, ...]:
    """Return the ranks that work on a matrix, its owner first; `where` has the position of each among `ranks`."""
    holders = matrix.holders
    if matrix.team_size > 1:
        teams = [[where[rank] for rank in team] for team in teams_among(holders, matrix.team_size)]
        return tuple(ranks[position] for position in owners.take_together(matrix.cost, teams))
    # All ranks hold parts, unless the matrix is an expert.
    candidates = None if len(holders) == len(ranks) else [where[rank] for rank in holders]
    return (ranks[owners.take(matrix.cost, candidates)],)


def _holder_side(matrices: Sequence[Matrix], owners: Sequence[int], ranks: Ranks, rank: int) -> HolderSide:
    out, back = ways(matrices)
    some = [(m, o, m.part(rank).size) for m, o in zip(matrices, owners) if m.shards.has_something(m.index, rank)]
    held = [entry for entry in some if entry[2]]
    moments = [matrix.moments_part(rank).size for matrix, _, _ in held]
    sources = [_same_copy(matrix, rank, owner) for matrix, owner, _ in held]
    sizes = [(owner, size, count) for (_, owner, size), count in zip(held, moments)]
    sent_sizes = ((o, out.length(size, count) * is_source) for (o, size, count), is_source in zip(sizes, sources))
    sent, places_out, flags_out = lay_out(ranks, sent_sizes, out.unit)
    received, places_in, flags_in = lay_out(ranks, ((o, back.length(size, n)) for o, size, n in sizes), back.unit)
    behind, directions = sum(sent), []
    for (_, _, size), is_source, place in zip(held, sources, places_out):
        directions.append(place if is_source else behind)
        behind += 0 if is_source else padded(size, out.unit)
    with_moments = [(i, size, count) for i, (_, size, count) in enumerate(sizes) if count]
    return HolderSide(
        sent=sent,
        received=received,
        scratch=behind - sum(sent),
        matrices=tuple(matrix for matrix, _, _ in held),
        direction_places=tuple(directions),
        update_places=tuple(places_in),
        presence_places=tuple((i, flag) for i, flag in enumerate(flags_out) if sources[i]),
        active_places=tuple(flags_in),
        moments_out=tuple((i, out.moments_place(places_out[i], size), n) for i, size, n in with_moments if sources[i]),
        moments_in=tuple((i, back.moments_place(places_in[i], size), n) for i, size, n in with_moments),
        weights_out=tuple(
            (i, out.weights_place(places_out[i], size, count))
            for i, (_, size, count) in enumerate(sizes)
            if out.takes_weights and sources[i]
        ),
    )


def _owner_side(owned: Sequence[Matrix], ranks: Ranks, rank: int) -> OwnerSide:
    out, back = ways(owned)
    holders = sorted((r, i) for i, matrix in enumerate(owned) for r in matrix.holders)
    parts = [(r, i, owned[i].part(r), owned[i].moments_part(r)) for r, i in holders]
    parts = [entry for entry in parts if entry[2].size]
    sources = [entry for entry in parts if _same_copy(owned[entry[1]], entry[0], rank)]
    came = ((r, out.length(part.size, moments.size)) for r, _, part, moments in sources)
    going = ((r, back.length(part.size, moments.size)) for r, _, part, moments in parts)
    received, places_in, flags_in = lay_out(ranks, came, out.unit)
    sent, places_out, flags_out = lay_out(ranks, going, back.unit)
    return OwnerSide(
        received=received,
        sent=sent,
        matrices=tuple(owned),
        parts_in=tuple((i, part, place) for (_, i, part, _), place in zip(sources, places_in)),
        parts_out=tuple((i, part, place) for (_, i, part, _), place in zip(parts, places_out)),
        presence_places=tuple((i, place) for (_, i, _, _), place in zip(sources, flags_in)),
        active_places=tuple((i, place) for (_, i, _, _), place in zip(parts, flags_out)),
        moments_in=_moments_places(sources, places_in, out),
        moments_out=_moments_places(parts, places_out, back),
        weights_in=tuple(
            (i, part, out.weights_place(place, part.size, m.size))
            for (_, i, part, m), place in zip(sources, places_in)
            if out.takes_weights
        ),
    )


def _moments_places(
    parts: Iterable[tuple[int, int, Part, Part]], places: Iterable[int], way: Way
) -> tuple[PartPlace, ...]:
    """Return the places of second moments, each behind its part: `parts` are (rank, matrix, part, its moments)."""
    pairs = zip(parts, places)
    return tuple((i, m, way.moments_place(place, part.size)) for (_, i, part, m), place in pairs if m.size)


def _same_copy(matrix: Matrix, rank: int, owner: int) -> bool:
    """Whether `rank` and `owner` have their parts from the same copy of the tensor."""
    layout = matrix.shards.layout
    return layout.copy_of(rank) == layout.copy_of(owner)
