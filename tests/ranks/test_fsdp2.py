"""Networks under FSDP2, with replicas and tensor parallelism, and pipelines: real meshes and real backward passes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.backends import on_every_backend
from tests.support.pieces import mesh_of
from tests.support.rank_pool import device_of_ranks, one_by_one
from tests.support.sharded_models import (
    Case,
    Spec,
    bits_equal,
    muon,
    one_thread,
    train_alone,
    whole,
    whole_gradient,
    whole_parameter,
    wholes,
)
from tests.support.sharded_networks import assert_same_network, network_on

STEPS, LR = 4, 0.02

pytestmark = on_every_backend()


def train_network(kernel, name: str):
    """Return, for each step, whole gradients and whole parameters after it, of backward passes under FSDP2."""
    network = network_on(name, device_of_ranks())
    optimizer = kernel.Muon(network.named_parameters(), lr=LR, exchange=kernel.ExchangeOptions(chunk_bytes=1000))
    # Data differ between the ranks that average gradients, and are the same within tensor parallelism.
    rank = mesh_of((2, 2)).get_local_rank("x") if name == "tp and fsdp" else dist.get_rank()
    data = torch.Generator().manual_seed(rank)
    history = []
    for _ in range(STEPS):
        x = torch.randn(6, 10, generator=data).to(device_of_ranks())
        (network(x) - x.flip(-1)).square().mean().backward()
        gradients = wholes({name: p.grad for name, p in network.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        history.append((gradients, wholes(dict(network.named_parameters()))))
    return history


def error_of_an_optimizer_made_after_a_forward_pass(kernel) -> str:
    network = fully_shard(network_on("one process", device_of_ranks()), mesh=mesh_of((4,)))
    x = torch.ones(6, 10, device=device_of_ranks())
    with torch.no_grad():
        network(x)
    early = kernel.Muon(network.named_parameters(), lr=LR)
    network(x).square().mean().backward()
    with pytest.raises(ValueError, match="is gone, and it has no gradient: FSDP2") as raised:
        early.step()
    network.zero_grad()
    network.reshard()
    optimizer = kernel.Muon(network.named_parameters(), lr=LR)
    network(x).square().mean().backward()
    optimizer.step()
    return str(raised.value)


def test_an_optimizer_made_after_a_forward_pass_says_so(kernel, pools):
    """The root of FSDP2 has whole parameters then, which never get a gradient."""
    assert all(
        "call model.reshard() first" in error for error in pools(4).run(error_of_an_optimizer_made_after_a_forward_pass)
    )


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
    for rank, parameters in enumerate(pools(4).run(train_stages, stages)):
        expected = alone[rank // 2].parameters
        assert len(parameters) == len(expected)
        assert all(map(bits_equal, parameters, expected))


class Weight(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(value)


def under_both(value):
    """Return a parameter whose last dimension tensor parallelism has cut, and whose first one fully_shard."""
    mesh = mesh_of((2, 2))
    module = Weight(distribute_tensor(value, mesh["y"], [Shard(value.ndim - 1)], src_data_rank=None))
    fully_shard(module, mesh=mesh["x"])
    return module.weight


def like(p: DTensor, value):
    """Return the part of a whole value that lies as `p` does, in the shape that it has there."""
    part = distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None).to_local()
    local = part.reshape(p.to_local().shape)
    lies = {"shape": p.shape, "stride": p.stride(), "run_check": False}
    return DTensor.from_local(local, p.device_mesh, p.placements, **lies)


def parts_that_differ(kernel, case: Case, expected) -> list[str]:
    """Train, and return the names of the parameters whose parts are not those of the expected wholes."""
    params = [under_both(whole_parameter(case, i).to(device_of_ranks())) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    for step in range(1, case.steps + 1):
        for i, p in enumerate(params):
            p.grad = like(p, whole_gradient(case, step, i))
        optimizer.step()
    triples = zip(case.specs, params, expected)
    return [spec.name for spec, p, q in triples if not bits_equal(p.detach().to_local(), like(p, q).to_local())]


@pytest.mark.parametrize("settings", [{}, {"second_moment": "rows"}, {"momentum_dtype": "int8"}], ids=str)
def test_a_rank_without_columns_takes_part(kernel, pools, settings):
    """fully_shard gives it no rows either, where its placements say that it has some."""
    shapes = {"a.up.weight": (5, 1), "b.up.weight": (6, 1), "c.experts.up": (3, 5, 1), "embeddings.weight": (7, 1)}
    specs = tuple(Spec(name, shape) for name, shape in shapes.items())
    specs = (specs[0], specs[1]._replace(group={"split_rows": (2, 4)}), *specs[2:])
    case = Case(specs, {"lr": LR, **settings}, steps=3)
    alone = train_alone(kernel, case, [torch.zeros(shape) for shape in shapes.values()], pools.device)
    assert pools(4).run(parts_that_differ, case, alone.parameters) == [[]] * 4
