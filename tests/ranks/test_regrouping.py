"""Sharded state that was saved in other groups is imported by every rank, and training goes on as it would have."""

import pytest
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.support.backends import on_every_backend
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import bits_equal
from tests.support.sharded_networks import network_on, set_gradients

pytestmark = on_every_backend()


def in_blocks(kernel, network):
    """Return a Muon with a group for each block, the last block first."""
    pairs = list(network.named_parameters())
    prefixes = sorted({name.rpartition(".")[0].rpartition(".")[0] for name, _ in pairs}, reverse=True)
    return kernel.Muon([{"params": [pair for pair in pairs if pair[0].startswith(each)]} for each in prefixes])


def take_steps(optimizer, network, seeds):
    for seed in seeds:
        set_gradients(network, seed)
        optimizer.step()


def regrouped(kernel, by_name: bool) -> bool:
    """Train two steps in one group and two in groups of blocks; whether bits are those of four steps in these."""
    network, straight = (network_on("fsdp on two ranks", device_of_ranks()) for _ in range(2))
    saver = kernel.Muon(network.named_parameters())
    take_steps(saver, network, range(2))
    network.zero_grad()
    saved = get_optimizer_state_dict(network, saver) if by_name else saver.state_dict()
    optimizer = in_blocks(kernel, network)
    assert len(optimizer.param_groups) > 2
    assert kernel.import_state(optimizer, saved, "other_groups") == []
    take_steps(optimizer, network, range(2, 4))
    take_steps(in_blocks(kernel, straight), straight, range(4))
    return all(bits_equal(p.to_local(), q.to_local()) for p, q in zip(network.parameters(), straight.parameters()))


@pytest.mark.parametrize("by_name", [False, True], ids=["by number", "by name"])
def test_training_goes_on_as_if_the_groups_had_always_been_so(pools, by_name):
    assert pools(2).run(regrouped, by_name) == [True, True]
