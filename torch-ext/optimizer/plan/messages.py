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
`step/agreement/meeting.py` has made sure before that copies of a part have their gradients together. Each rank makes
its own side of the plan, from facts that all ranks know.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

from .matrix import Matrix
from .owners import Owners, chunks_by_size
from .part_format import LaidOutParts, Offsets, PartSize, formats, lay_out, padded
from .process_groups import Ranks
from .shards import Part
from .teams import teams_among


class Assignment(NamedTuple):
    """The ranks that work on a matrix, its owner first: several if a team does."""

    matrix: Matrix
    workers: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The rank that gets the direction and sends the update."""
        return self.workers[0]


class HeldPart(NamedTuple):
    """A part that a rank holds, and where it is in the buffers of the gather and the scatter."""

    matrix: Matrix
    size: PartSize
    direction: int  # where its direction is written: in what is sent, or in scratch memory behind that
    gathered: Optional[Offsets]  # None if it is not sent, because the owner gets it from another copy
    scattered: Offsets


class HolderSide(NamedTuple):
    """What a rank does for the parts that it holds.

    If several ranks hold copies of a part, only the rank in the owner's copy sends it. The others write their direction
    to scratch memory behind the outgoing messages.
    """

    sent: tuple[int, ...]  # elements of the message to each rank, in the gather
    received: tuple[int, ...]  # elements of the message from each rank, in the scatter
    scratch: int
    parts: tuple[HeldPart, ...]  # in the order of the chunk


class OwnedPart(NamedTuple):
    """A part of a matrix that a rank owns, and where it is in the buffers of the gather and the scatter."""

    position: int  # of the matrix among those that the rank owns
    part: Part
    moments: Part  # of one row or one column, or empty
    gathered: Optional[Offsets]  # None if it does not come, because another copy is sent
    scattered: Offsets


class OwnerSide(NamedTuple):
    """What a rank does for the matrices that it owns."""

    received: tuple[int, ...]  # elements of the message from each rank, in the gather
    sent: tuple[int, ...]  # elements of the message to each rank, in the scatter
    matrices: tuple[Matrix, ...]
    parts: tuple[OwnedPart, ...]


class Messages(NamedTuple):
    """One rank's side of a set of matrices that are exchanged together, and who works on each of them."""

    holder: HolderSide
    owner: OwnerSide
    assignments: tuple[Assignment, ...]

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
        assignments = tuple(Assignment(matrices[i], _workers(owners, matrices[i], ranks, where)) for i in positions)
        owned = [each.matrix for each in assignments if each.owner == rank]
        chunks.append(Messages(_holder_side(assignments, ranks, rank), _owner_side(owned, ranks, rank), assignments))
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


class _Transfer(NamedTuple):
    """A part on its way between the rank that holds it and its matrix's owner, as one of the two sees it."""

    matrix: Matrix
    peer: int  # the other of the two ranks
    part: Part
    moments: Part
    is_gathered: bool  # False if the owner gets it from another copy

    @property
    def size(self) -> PartSize:
        """Its elements and second moments."""
        return PartSize(self.part.size, self.moments.size)


def _holder_side(assignments: Sequence[Assignment], ranks: Ranks, rank: int) -> HolderSide:
    matrices = [each.matrix for each in assignments]
    here = [each for each in assignments if each.matrix.shards.has_something(each.matrix.index, rank)]
    transfers = [_transfer(each.matrix, rank, each.owner, peer=each.owner) for each in here]
    transfers = [each for each in transfers if each.part.size]
    gather, scatter = _laid_out(transfers, matrices, ranks)
    unit, outgoing = formats(matrices)[0].unit, sum(gather.lengths)
    end, parts = outgoing, []
    for each, of_gather, of_scatter in zip(transfers, gather.offsets, scatter.offsets):
        direction = end if of_gather is None else of_gather.elements
        end += padded(each.part.size, unit) if of_gather is None else 0
        parts.append(HeldPart(each.matrix, each.size, direction, of_gather, of_scatter))
    return HolderSide(gather.lengths, scatter.lengths, end - outgoing, tuple(parts))


def _owner_side(owned: Sequence[Matrix], ranks: Ranks, rank: int) -> OwnerSide:
    holders = sorted((holder, i) for i, matrix in enumerate(owned) for holder in matrix.holders)
    held = [(i, _transfer(owned[i], holder, rank, peer=holder)) for holder, i in holders]
    held = [(i, each) for i, each in held if each.part.size]
    gather, scatter = _laid_out([each for _, each in held], owned, ranks)
    parts = (
        OwnedPart(i, each.part, each.moments, of_gather, of_scatter)
        for (i, each), of_gather, of_scatter in zip(held, gather.offsets, scatter.offsets)
    )
    return OwnerSide(gather.lengths, scatter.lengths, tuple(owned), tuple(parts))


def _transfer(matrix: Matrix, holder: int, owner: int, peer: int) -> _Transfer:
    layout = matrix.shards.layout
    from_one_copy = layout.copy_of(holder) == layout.copy_of(owner)
    return _Transfer(matrix, peer, matrix.part(holder), matrix.moments_part(holder), from_one_copy)


def _laid_out(
    transfers: Sequence[_Transfer], matrices: Sequence[Matrix], ranks: Ranks
) -> tuple[LaidOutParts, LaidOutParts]:
    """Return how the messages of the gather and of the scatter are laid out."""
    out, back = formats(matrices)
    gathered = ((each.peer, each.size if each.is_gathered else None) for each in transfers)
    return lay_out(ranks, gathered, out), lay_out(ranks, ((each.peer, each.size) for each in transfers), back)
