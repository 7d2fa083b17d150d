"""A batch of matrices that this rank owns, and the indices that move its blocks between messages and matrices."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from ..plan.batches import Batch
from ..plan.blocks import Block
from ..plan.exchanges import OwnedBatch


class LocalOwned(NamedTuple):
    """The plan's `OwnedBatch` with its numbers as tensors, int64."""

    batch: Batch
    positions: Tensor  # of its matrices among all that are owned, on the device
    blocks_in: Tensor  # on the CPU, where `move_blocks_` reads them at the call
    blocks_out: Tensor
    moments_in: Tensor  # the same for their second moments
    moments_out: Tensor
    weights_in: Tensor  # the same for the parameters' matrices, if their norms are kept


def local_owned(owned: OwnedBatch, device: torch.device) -> LocalOwned:
    """Return the tensors of a batch that is owned."""
    positions = torch.tensor(owned.positions, dtype=torch.int64, device=device)
    moved = (owned.blocks_in, owned.blocks_out, owned.moments_in, owned.moments_out, owned.weights_in)
    return LocalOwned(owned.batch, positions, *map(block_table, moved))


def block_table(blocks: Sequence[Block]) -> Tensor:
    """Return blocks (N, 9) as `move_blocks_` takes them."""
    return torch.tensor(blocks, dtype=torch.int64, device="cpu").reshape(-1, len(Block._fields))
