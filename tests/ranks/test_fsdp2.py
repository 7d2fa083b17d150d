"""Networks under FSDP2, with replicas and tensor parallelism, and pipelines: real meshes and real backward passes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.backends import on_every_backend
from tests.support.rank_pool import device_of_ranks, one_by_one
from tests.support.sharded_models import (
    Case,
    Spec,
    bits_equal,
    mesh_of,
    muon,
    one_thread,
    train_alone,
    whole,
    whole_gradient,
    whole_parameter,
    wholes,
)
from tests.support.sharded_networks import assert_same_network, network_on

STEPS, LR = 12, 0.02

pytestmark = on_every_backend()


def train_network(kernel, name: str):
    """Return, for each step, whole gradients and whole parameters after it, of backward passes under FSDP2."""
    network = network_on(name, device_of_ranks())
    optimizer = kernel.Muon(network.named_parameters(), lr=LR, exchange=kernel.ExchangeOptions(chunk_bytes=1000))
    # Data differ between the ranks that average gradients, and are the same within tensor parallelism.
    rank = mesh_of((2, 2)).get_local_rank("x") if name == "tp and fsdp" else dist.get_rank()
    data = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(STEPS):
        x = torch.randn(6, 10, generator=data).to(device_of_ranks())
        (network(x) - x.flip(-1)).square().mean().backward()
        gradients = wholes({name: p.grad for name, p in network.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        found.append((gradients, wholes(dict(network.named_parameters()))))
    return found


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "tp and fsdp"])
def test_fsdp2_backward_passes_end_as_in_one_process(kernel, pools, name):
    network = network_on("one process", pools.device)
    optimizer = kernel.Muon(network.named_parameters(), lr=LR)
    for step in zip(*pools(4).run(train_network, name)):
        gradients = step[0][0]
        for name, p in network.named_parameters():
            p.grad = gradients[name].to(p.device)
        with one_thread(), one_by_one(kernel):
            optimizer.step()
        for _, params in step:
            assert_same_network(params, wholes(dict(network.named_parameters())))


def train_stages(kernel, stages):
    """The first half of the ranks has one pipeline stage, the second another one; returns the stage's wholes."""
    # Made by everybody, as torch wants it; the groups of a step are the optimizer's.
    mesh = mesh_of((2, 2))
    case, rows = stages[mesh.get_local_rank("x")], mesh["y"]

    def part(value):
        return distribute_tensor(value, rows, [Shard(0)], src_data_rank=None)

    params = [nn.Parameter(part(whole_parameter(case, i))) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    for step in range(1, case.steps + 1):
        for i, p in enumerate(params):
            p.grad = part(whole_gradient(case, step, i))
        optimizer.step()
    return [whole(p) for p in params]


def test_pipeline_stages_wait_only_for_their_own_ranks(kernel, pools):
    """They differ in parameters, in chunks, and in the number of steps that they make."""
    shapes = [(9, 12), (13, 4), (6, 6), (12, 9), (2, 20)]
    specs = tuple(Spec(f"layers.{i}.up.weight", shape) for i, shape in enumerate(shapes))
    stages = Case(specs[:1], {"chunk_bytes": 200}, seed=1, steps=3), Case(specs[1:], {"chunk_bytes": 100}, seed=2)
    alone = [train_alone(kernel, case, [torch.zeros(s.shape) for s in case.specs], pools.device) for case in stages]
    for rank, found in enumerate(pools(4).run(train_stages, stages)):
        expected = alone[rank // 2].parameters
        assert len(found) == len(expected)
        assert all(map(bits_equal, found, expected))
