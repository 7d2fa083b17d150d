"""A distributed checkpoint of AdamW comes to Muon by way of an AdamW, as docs/faq.md says."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.support.backends import on_every_backend
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import bits_equal
from tests.support.sharded_networks import network_on, set_gradients

pytestmark = on_every_backend()

OPTIONS = {
    "by number": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "whole": StateDictOptions(full_state_dict=True),
}


def imported(kernel, how: str, folder: str) -> None:
    """Save the state of an AdamW after a step, load it into another, and import it from there."""
    network, options = network_on("fsdp on two ranks", device_of_ranks()), OPTIONS[how]
    saver, reader = (torch.optim.AdamW(network.named_parameters(), lr=0.25) for _ in range(2))
    set_gradients(network, 0)
    saver.step()
    saver.zero_grad()  # where there are gradients, torch makes no state to read into
    dcp.save(get_optimizer_state_dict(network, saver, options=options), checkpoint_id=folder)
    optimizer = kernel.Muon(network.named_parameters())
    saved = get_optimizer_state_dict(network, saver, options=options)
    with pytest.raises(ValueError if how == "by number" else KeyError):
        set_optimizer_state_dict(network, optimizer, saved, options=options)
    state = get_optimizer_state_dict(network, reader, options=options)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(network, reader, state, options=options)
    kernel.import_state(optimizer, reader.state_dict(), "adamw")
    for p in network.parameters():
        theirs, ours = saver.state[p], optimizer.state[p]
        assert bits_equal(theirs["exp_avg"].to_local(), ours["momentum_buffer" if p.ndim > 1 else "exp_avg"].to_local())
    set_gradients(network, 1)
    optimizer.step()


@pytest.mark.parametrize("how", OPTIONS)
def test_a_checkpoint_of_adamw_is_imported_from_an_adamw(pools, tmp_path, how):
    pools(2).run(imported, how, str(tmp_path))
