"""A whole state that has other parts than a sharded optimizer is loaded as its error says."""

import re

import pytest
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.support.backends import on_every_backend
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_networks import network_on, set_gradients

pytestmark = on_every_backend()

SETTINGS = {"plain": {}, "moments": {"second_moment": "rows"}, "8 bits": {"momentum_dtype": "int8"}}
ADVICE = r"was saved with .*Construct the optimizer with (.*), load, and then set (.*) in its groups"


def loaded_as_advised(kernel, there: str, here: str) -> str:
    """Take a step after both loads, of which the first raises; return its error."""
    network, options = network_on("fsdp on two ranks", device_of_ranks()), StateDictOptions(full_state_dict=True)

    def made(settings):
        return kernel.Muon(network.named_parameters(), **settings)

    saved = get_optimizer_state_dict(network, made(SETTINGS[there]), options=options)
    with pytest.raises(ValueError) as error:
        set_optimizer_state_dict(network, made(SETTINGS[here]), saved, options=options)
    needed, wanted = (eval(f"dict({text})") for text in re.search(ADVICE, str(error.value)).groups())
    optimizer = made(needed)
    set_optimizer_state_dict(network, optimizer, saved, options=options)
    for group in optimizer.param_groups:
        group.update(wanted)
    set_gradients(network, 0)
    optimizer.step()
    return str(error.value)


@pytest.mark.parametrize(
    "there, here", [(there, here) for there in SETTINGS for here in SETTINGS if there != here], ids=str
)
def test_a_whole_state_with_other_parts_is_loaded_as_its_error_says(pools, there, here):
    for error in pools(2).run(loaded_as_advised, there, here):
        assert "blocks.0.up.weight was saved with" in error
