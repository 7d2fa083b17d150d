"""A part of a sharded state that a user has put there must not be memory of its parameter."""

import pytest
import torch
from torch.distributed.tensor import DTensor

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
