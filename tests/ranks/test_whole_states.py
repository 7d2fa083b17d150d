"""A state of whole tensors, as one process or `full_state_dict` saves it: each rank takes its parts."""

from __future__ import annotations

import io
import re

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks.test_regrouping import in_blocks
from tests.support.backends import on_every_backend
from tests.support.pieces import mesh_of
from tests.support.rank_pool import device_of_ranks
from tests.support.refusals import error_of
from tests.support.sharded_models import bits_equal, whole, wholes
from tests.support.sharded_networks import assert_same_network, network_on, set_gradients

pytestmark = on_every_backend()
WHOLE = StateDictOptions(full_state_dict=True)
WAYS = ["load_state_dict", "import_state"]


def in_one_group(kernel, network: nn.Module):
    return kernel.Muon(network.named_parameters())


def take_steps(optimizer, network: nn.Module, steps) -> None:
    for step in steps:
        set_gradients(network, step)
        optimizer.step()
    optimizer.zero_grad()


def as_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


def trained_by_one_process(kernel):
    """Return a network that is whole, and its optimizer, after two steps."""
    network = network_on("one process", device_of_ranks())
    optimizer = in_one_group(kernel, network)
    take_steps(optimizer, network, range(2))
    return network, optimizer


def loaded(kernel, network: nn.Module, saved, how: str):
    """Return an optimizer of the network that has loaded a state of one group; `import_state` gets three groups."""
    if how == "load_state_dict":
        optimizer = in_one_group(kernel, network)
        optimizer.load_state_dict(saved)
        return optimizer
    optimizer = in_blocks(kernel, network)
    assert kernel.import_state(optimizer, saved, "other_groups") == []
    return optimizer


def parameters_of(network: nn.Module) -> dict[str, torch.Tensor]:
    return wholes(dict(network.named_parameters()))


def take_over(network: nn.Module, other: nn.Module) -> None:
    """Give a network the weights of another one, in its layout. torch's own functions refuse strided shards."""
    with torch.no_grad():
        for p, value in zip(network.parameters(), map(whole, other.parameters())):
            p.copy_(distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None))


def gone_on_with_shards(kernel, name: str, how: str) -> None:
    """Shard what one process has trained; both go on alike."""
    network, optimizer = trained_by_one_process(kernel)
    sharded = network_on(name, device_of_ranks(), seed=1)
    take_over(sharded, network)
    other = loaded(kernel, sharded, as_file(optimizer.state_dict()), how)
    assert all(p.device == value.device for p in other.state for value in other.state[p].values())
    for each in ((optimizer, network), (other, sharded)):
        take_steps(*each, range(2, 4))
    assert_same_network(parameters_of(sharded), parameters_of(network))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", ["fsdp", "hsdp", "tp and fsdp"])
def test_what_one_process_has_trained_goes_on_in_shards(pools, name, how):
    pools(4).run(gone_on_with_shards, name, how)


def gone_on_in_another_layout(kernel, how: str) -> None:
    """Gather the state of a sharded network by name, and load it for one in another layout; both go on alike."""
    networks = [network_on(name, device_of_ranks(), seed) for seed, name in enumerate(["fsdp", "tp and fsdp"])]
    first = in_one_group(kernel, networks[0])
    take_steps(first, networks[0], range(2))
    take_over(networks[1], networks[0])
    saved = get_optimizer_state_dict(networks[0], first, options=WHOLE)
    other = loaded(kernel, networks[1], as_file(saved), how)
    for each in zip((first, other), networks):
        take_steps(*each, range(2, 4))
    assert_same_network(*map(parameters_of, networks))


@pytest.mark.parametrize("how", WAYS)
def test_a_full_state_dict_goes_on_in_another_layout(pools, how):
    pools(4).run(gone_on_in_another_layout, how)


def imported_from_adamw(kernel, name: str) -> None:
    """Import the gathered state of an AdamW: momentum and averages are its averages, bit for bit."""
    network = network_on(name, device_of_ranks())
    adamw = torch.optim.AdamW(network.named_parameters(), lr=0.25)
    set_gradients(network, 0)
    adamw.step()
    saved = get_optimizer_state_dict(network, adamw, options=WHOLE)
    optimizer = in_one_group(kernel, network)
    kernel.import_state(optimizer, as_file(saved), "adamw")
    for p in network.parameters():
        key = "momentum_buffer" if p.ndim > 1 else "exp_avg"
        assert bits_equal(adamw.state[p]["exp_avg"].to_local(), optimizer.state[p][key].to_local())
    optimizer.step()


@pytest.mark.parametrize("name", ["fsdp", "tp and fsdp"])
def test_a_full_state_dict_of_adamw_is_imported_as_it_is(pools, name):
    pools(4).run(imported_from_adamw, name)


def network_with_a_scalar() -> nn.Module:
    network, one = network_on("fsdp on two ranks", device_of_ranks()), torch.ones((), device=device_of_ranks())
    network.logit_scale = nn.Parameter(distribute_tensor(one, mesh_of((2,)), [Replicate()]))
    return network


def scalar_after_a_load(kernel) -> None:
    """Gather the state of a network with a scalar, and load it for another one; both go on alike."""
    networks = [network_with_a_scalar() for _ in range(2)]
    first, other = (in_one_group(kernel, network) for network in networks)
    take_steps(first, networks[0], range(2))
    saved = get_optimizer_state_dict(networks[0], first, options=WHOLE)
    set_optimizer_state_dict(networks[1], other, saved, options=WHOLE)
    take_over(networks[1], networks[0])
    for each in zip((first, other), networks):
        take_steps(*each, range(2, 4))
    assert_same_network(*map(parameters_of, networks))


def test_a_full_state_dict_of_a_scalar_loads(pools):
    """torch leaves the state of parameters without dimensions whole."""
    pools(2).run(scalar_after_a_load)


def replaced_by_wholes(kernel, name: str, settings, later) -> None:
    """Put wholes in the place of a sharded state: the next step is that of the shards, and leaves shards."""
    networks = [network_on(name, device_of_ranks()) for _ in range(2)]
    optimizers = [kernel.Muon(network.named_parameters(), lr=0.02, **settings) for network in networks]
    for each in zip(optimizers, networks):
        take_steps(*each, range(2))
    for state in optimizers[0].state.values():
        state.update({key: value.requires_grad_(value.is_floating_point()) for key, value in wholes(state).items()})
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update(later)
        optimizer.state_dict()
    for each in zip(optimizers, networks):
        take_steps(*each, range(2, 4))
    assert_same_network(*map(parameters_of, networks))
    states = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for one, other in zip(*(state.values() for state in states)):
        assert all(type(one[key]) is type(other[key]) for key in other)
        assert all(bits_equal(*map(local_part, (one[key], other[key]))) for key in other)


CHANGES = {
    "second moments": ({"second_moment": "rows"}, {}),
    "8 bits": ({"momentum_dtype": "int8"}, {}),
    "no longer 8 bits": ({"momentum_dtype": "int8"}, {"momentum_dtype": None}),
}


@pytest.mark.parametrize("settings, later", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["hsdp", "fsdp"])
def test_wholes_in_the_place_of_a_sharded_state_are_cut(pools, name, settings, later):
    pools(4).run(replaced_by_wholes, name, settings, later)


def local_part(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def loaded_on_some_ranks(kernel, settings) -> None:
    """Load wholes for a parameter that the last rank has no part of, and take a step."""
    values = [torch.randn(6, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    p = nn.Parameter(values[0].bfloat16().to(device_of_ranks()))
    one = kernel.Muon([("up.weight", p)], **settings)
    p.grad = values[1].bfloat16().to(p.device)
    one.step()
    q = nn.Parameter(distribute_tensor(p.detach(), DeviceMesh(p.device.type, [0, 1]), [Shard(0)], src_data_rank=None))
    other = kernel.Muon([("up.weight", q)], **settings)
    other.load_state_dict(as_file(one.state_dict()))
    assert kernel.import_state(other, as_file(one.state_dict()), "other_groups") == []
    other.load_master_weights(one.master_weights())
    # A rank without a part gets an empty one on the CPU from whatever torch does with a DTensor, as in `Parameter`.
    q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements, src_data_rank=None).detach()
    for optimizer in (one, other):
        optimizer.step()
    assert q.to_local().numel() == 0 or bits_equal(q.full_tensor(), p.detach())


@pytest.mark.parametrize("momentum_dtype", ["float32", "int8"])
def test_a_rank_without_a_part_takes_none(pools, momentum_dtype):
    settings = {"lr": 0.02, "master_weights": "split", "second_moment": "rows", "momentum_dtype": momentum_dtype}
    pools(3).run(loaded_on_some_ranks, settings)


def errors_of_loads(kernel) -> list[str]:
    """Load a part in the place of a whole, and shards into parameters that are whole; nothing has changed then."""
    sharded, plain = (network_on(name, device_of_ranks()) for name in ("fsdp on two ranks", "one process"))
    optimizers = [in_one_group(kernel, network) for network in (sharded, plain)]
    states = [optimizer.state_dict() for optimizer in optimizers]
    cut = {number: {key: local_part(x) for key, x in state.items()} for number, state in states[0]["state"].items()}
    before = [list(state.items()) for optimizer in optimizers for state in optimizer.state.values()]
    errors = [
        error_of(lambda: optimizers[0].load_state_dict({**states[0], "state": cut})),
        error_of(lambda: optimizers[1].load_state_dict(states[0])),
    ]
    after = [list(state.items()) for optimizer in optimizers for state in optimizer.state.values()]
    assert all(a is b for one, other in zip(before, after) for (_, a), (_, b) in zip(one, other))
    return errors


def test_parts_are_no_wholes_and_shards_need_sharded_parameters(pools):
    for of_part, of_shards in pools(2).run(errors_of_loads):
        assert re.search(r"state momentum_buffer of \S+ has shape \(13, 10\), needs \(26, 10\)", of_part)
        assert "is sharded and the parameter is whole" in of_shards
