"""A chunk of exchanged matrices as tensors of this process: its parts, its batches, and where both are in messages."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..plan.batches import Batch
from ..plan.blocks import Block
from ..plan.exchanges import Chunk, OwnedBatch
from ..plan.teams import Team
from ..rules.descent import as_tensor
from .local_matrix import LocalMatrix
from .moments import MovedMoments, moved_moments
from .recipe import RecipeKey, recipe_key


class LocalOwnedBatch(NamedTuple):
    """The plan's `OwnedBatch` with its numbers as tensors, int64."""

    batch: Batch
    recipe_key: RecipeKey
    positions: Tensor  # of its matrices among all that are owned, on the device
    blocks_in: Tensor  # on the CPU, where `move_blocks_` reads them at the call
    blocks_out: Tensor
    moments_in: Tensor  # the same for their second moments
    moments_out: Tensor
    weights_in: Tensor  # the same for the parameters' matrices, if their norms are kept


class LocalChunk(NamedTuple):
    """A chunk's parts and batches of this rank, and where they are in its buffers.

    Offsets of flags are int64, on the device.
    """

    chunk: Chunk
    parts: Sequence[LocalMatrix]  # those that this rank holds
    recipe_key: RecipeKey  # of the parts
    multipliers: Tensor  # of the parts, float64 on the CPU, read there by the descent
    directions: Sequence[int]  # offset of each part in what is gathered
    updates: Sequence[int]  # offset of each part in what comes back
    weights_out: Sequence[tuple[int, int]]  # a part, and the offset at which its parameter's elements are sent
    sent: Sequence[int]  # the parts that are sent
    presence_out: Tensor  # offsets of their flags in what is gathered
    active_in: Tensor  # offset of each part's flag in what comes back
    presence_in: Tensor  # (2, flags): owned matrix, offset of the flag
    active_out: Tensor  # (2, flags): owned matrix, offset of the flag
    owned: Sequence[Sequence[LocalOwnedBatch]]  # chains
    teams: Sequence[tuple[Team, Optional[LocalOwnedBatch]]]  # with a batch if this rank owns the matrix
    moments: Optional[MovedMoments]  # None if no part has second moments


def local_chunk(chunk: Chunk, parts: Sequence[LocalMatrix]) -> LocalChunk:
    """Return the tensors of a chunk, of which `parts` are those that this rank holds, in the plan's order."""
    held_parts, owned_parts, parameter = chunk.messages.holder.parts, chunk.messages.owner.parts, chunk.first.parameter
    sent = [(i, part.gathered) for i, part in enumerate(held_parts) if part.gathered is not None]
    device = parameter.device

    def flags(offsets: Sequence) -> Tensor:
        return torch.tensor(offsets, dtype=torch.int64, device=device)

    return LocalChunk(
        chunk=chunk,
        parts=parts,
        recipe_key=recipe_key([part.matrix for part in held_parts] or [chunk.first]),
        multipliers=as_tensor([part.matrix.multiplier for part in held_parts]),
        directions=[part.direction for part in held_parts],
        updates=[part.scattered.elements for part in held_parts],
        weights_out=[(i, gathered.weights) for i, gathered in sent] if parameter.keeps_norm else (),
        sent=[i for i, _ in sent],
        presence_out=flags([gathered.flag for _, gathered in sent]),
        active_in=flags([part.scattered.flag for part in held_parts]),
        presence_in=flags([(p.position, p.gathered.flag) for p in owned_parts if p.gathered is not None]).view(-1, 2).T,
        active_out=flags([(part.position, part.scattered.flag) for part in owned_parts]).view(-1, 2).T,
        owned=[[_local_owned_batch(each, device) for each in chain] for chain in chunk.chains],
        teams=[(team, each and _local_owned_batch(each, device)) for team, each in chunk.teams],
        moments=moved_moments(held_parts, parameter.moments_dtype, device),
    )


def _local_owned_batch(owned: OwnedBatch, device: torch.device) -> LocalOwnedBatch:
    positions = torch.tensor(owned.positions, dtype=torch.int64, device=device)
    moved = (owned.blocks_in, owned.blocks_out, owned.moments_in, owned.moments_out, owned.weights_in)
    return LocalOwnedBatch(owned.batch, recipe_key(owned.batch.matrices), positions, *map(block_table, moved))


def block_table(blocks: Sequence[Block]) -> Tensor:
    """Return blocks (N, 9) as `move_blocks_` takes them."""
    return torch.tensor(blocks, dtype=torch.int64, device="cpu").reshape(-1, len(Block._fields))
