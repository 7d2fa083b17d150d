"""A parameter that is resharded between steps needs a state that is resharded with it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.backends import on_every_backend
from tests.support.pieces import mesh_of
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import bits_equal

pytestmark = on_every_backend()

ROWS = [Shard(0), Replicate()]
# The parts of the second one have the same shapes as before, so only their places tell.
RESHARDED = {"other dimension": [Shard(1), Replicate()], "other ranks": [Replicate(), Shard(0)]}


def lay(value, placements):
    return distribute_tensor(value, mesh_of((2, 2)), placements, src_data_rank=None)


def train(kernel, placements, with_state):
    """Take two steps, with other placements in the second; return the whole parameter, or what that step raised."""
    W, G = (torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(device_of_ranks()) for seed in (0, 1))
    p = torch.nn.Parameter(lay(W, ROWS))
    optimizer = kernel.Muon([("w", p)], second_moment="rows")
    p.grad = lay(G, ROWS)
    optimizer.step()
    p.grad = None
    torch.utils.swap_tensors(p, torch.nn.Parameter(lay(p.detach().full_tensor(), placements)))
    p.grad = lay(G, placements)
    for key, value in optimizer.state[p].items() if with_state else ():
        optimizer.state[p][key] = lay(value.full_tensor(), placements)
    before = p.detach().full_tensor()
    try:
        optimizer.step()
    except ValueError as error:
        assert torch.equal(p.detach().full_tensor(), before)
        return str(error)
    return p.detach().full_tensor().cpu()


@pytest.mark.parametrize("placements", RESHARDED.values(), ids=RESHARDED)
def test_a_state_that_stays_behind_is_refused(pools, placements):
    for said in pools(4).run(train, placements, False):
        assert said.startswith("state momentum_buffer of w has placements (Shard(dim=0), Replicate()) on DeviceMesh(")


@pytest.mark.parametrize("placements", RESHARDED.values(), ids=RESHARDED)
def test_a_state_that_moves_along_continues(pools, placements):
    expected = pools(4).run(train, ROWS, False)
    assert all(map(bits_equal, pools(4).run(train, placements, True), expected))
