"""Tensors in a sharded state that steps cannot use: memory of a parameter, and parts of other rows."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.pieces import mesh_of
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import bits_equal
from tests.support.sharded_networks import network_on, set_gradients


def step_with_shared_momentum(kernel):
    network = network_on("fsdp on two ranks", device_of_ranks())
    optimizer = kernel.Muon(network.named_parameters())
    p = network.blocks[1].up.weight
    state = optimizer.state[p]
    state["momentum_buffer"] = DTensor.from_local(
        p.to_local().detach(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
    )
    before = p.to_local().detach().clone()
    set_gradients(network, 0)
    words = r"state momentum_buffer of blocks\.1\.up\.weight shares memory with blocks\.1\.up\.weight"
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert bits_equal(p.to_local().detach(), before)
    state["momentum_buffer"] = torch.zeros_like(p).detach()
    optimizer.step()


def test_momentum_that_is_the_memory_of_a_shard_is_refused(pools):
    pools(2).run(step_with_shared_momentum)


def step_with_momentum_of_other_rows(kernel):
    mesh = mesh_of((2, 2))
    p = nn.Parameter(distribute_tensor(torch.ones(8, 12, device=device_of_ranks()), mesh, [Shard(0), Replicate()]))
    optimizer = kernel.Muon([("up.weight", p)])
    p.grad = torch.ones_like(p)
    optimizer.step()
    before, state = p.to_local().detach().clone(), optimizer.state[p]
    state["momentum_buffer"] = state["momentum_buffer"].redistribute(mesh, [Replicate(), Shard(0)])
    with pytest.raises(ValueError, match=r"state momentum_buffer of up\.weight has placements"):
        optimizer.step()
    assert bits_equal(p.to_local().detach(), before)


def test_momentum_that_lies_on_ranks_otherwise_is_refused(pools):
    """Each rank's part has the same shape, and two ranks have each other's."""
    pools(4).run(step_with_momentum_of_other_rows)
