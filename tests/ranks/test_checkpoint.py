"""A checkpoint of one layout continues on any other one, with the steps of a run that was never interrupted.

Layouts are of four ranks, of two, and of one process.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.support.backends import on_every_backend
from tests.support.rank_pool import one_by_one
from tests.support.sharded_models import one_thread, wholes
from tests.support.sharded_networks import NETWORK_LAYOUTS, assert_same_network, network_on, set_gradients

BEFORE, AFTER = 5, 4
LR = 0.02

pytestmark = on_every_backend()


# Of the matrices in each of the three blocks.
SECOND_MOMENTS = "none", "rows", "long_side"


def trained(kernel, name: str, device: str, steps, seed: int = 0):
    """Return a network, whose blocks differ in their second moments, and its optimizer after these steps."""
    network = network_on(name, device, seed)
    groups = [
        {"params": [pair for pair in network.named_parameters() if f".{block}." in pair[0]], "second_moment": by}
        for block, by in enumerate(SECOND_MOMENTS)
    ]
    optimizer = kernel.Muon(groups, lr=LR, exchange=kernel.ExchangeOptions(chunk_bytes=1000))
    take_steps(network, optimizer, steps)
    return network, optimizer


def take_steps(network, optimizer, steps) -> None:
    for step in steps:
        set_gradients(network, step)
        optimizer.step()
    optimizer.zero_grad()


def parameters_of(network) -> dict[str, torch.Tensor]:
    return wholes(dict(network.named_parameters()))


def state_of(network, optimizer):
    model, optim = get_state_dict(network, optimizer)
    return {"model": model, "optim": optim}


def save(kernel, name: str, device: str, folder: str):
    dcp.save(state_of(*trained(kernel, name, device, range(1, BEFORE + 1))), checkpoint_id=folder)


def save_while_training_goes_on(kernel, name: str, device: str, folder: str):
    network, optimizer = trained(kernel, name, device, range(1, BEFORE + 1))
    # In one group of CPUs a step and a checkpoint that is being written would mix their messages; NCCL's have no CPUs.
    group = dist.new_group(backend="gloo")
    saved = dcp.async_save(state_of(network, optimizer), checkpoint_id=folder, process_group=group)
    take_steps(network, optimizer, range(100, 103))
    saved.result()


def resume(kernel, name: str, device: str, folder: str, steps=range(BEFORE + 1, BEFORE + AFTER + 1)):
    """Load into a network of other weights, and go on; returns whole parameters."""
    network, optimizer = trained(kernel, name, device, (), seed=1)
    state = state_of(network, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    take_steps(network, optimizer, steps)
    return parameters_of(network)


def run(kernel, pools, name: str, job, folder):
    """Run a job where the layout wants it: on as many ranks as its mesh has, or in this process alone."""
    if NETWORK_LAYOUTS[name] is not None:
        shape, _ = NETWORK_LAYOUTS[name]
        return pools(math.prod(shape)).run(job, name, pools.device, str(folder))
    with one_thread(), one_by_one(kernel):
        return [job(kernel, name, pools.device, str(folder))]


@pytest.fixture(scope="module")
def uninterrupted(kernel, pools):
    with one_thread(), one_by_one(kernel):
        return parameters_of(trained(kernel, "one process", pools.device, range(1, BEFORE + AFTER + 1))[0])


@pytest.fixture(scope="module", params=NETWORK_LAYOUTS)
def checkpoint(request, kernel, pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    run(kernel, pools, request.param, save, folder)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", NETWORK_LAYOUTS)
def test_any_layout_continues_a_checkpoint_of_any_other(kernel, pools, checkpoint, uninterrupted, name):
    for parameters in run(kernel, pools, name, resume, checkpoint):
        assert_same_network(parameters, uninterrupted)


@pytest.mark.parametrize("name", ["fsdp", "tp and fsdp"])
def test_async_checkpoint_holds_the_state_of_its_time(kernel, pools, uninterrupted, tmp_path, name):
    run(kernel, pools, name, save_while_training_goes_on, tmp_path)
    for parameters in run(kernel, pools, "hsdp", resume, tmp_path):
        assert_same_network(parameters, uninterrupted)
