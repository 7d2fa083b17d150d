"""FSDP2 over tensor parallelism where sizes do not divide evenly: tensor parallelism has cut first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.rank_pool import one_by_one
from tests.support.sharded_models import mesh_of, one_thread, wholes
from tests.support.sharded_networks import assert_same_network

STEPS, LR = 3, 0.02
MESH = 3, 2  # FSDP2's ranks, and tensor parallelism's
ROWS = 7, 13, 8  # tensor parallelism makes 4 + 3, 7 + 6 and 4 + 4 of them
PLACED = _StridedShard(0, split_factor=2), Shard(0)


class Network(nn.Module):
    """The parameters of `up` are Muon's and AdamW's, the embeddings AdamW's; all are cut along dimensions of `rows`."""

    def __init__(self, rows: int):
        super().__init__()
        torch.manual_seed(rows)
        self.embeddings = nn.Embedding(rows, 10)
        self.up = nn.Linear(10, rows)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.up(self.embeddings(tokens))


def under_both(rows: int) -> Network:
    network, mesh, whole = Network(rows), mesh_of(MESH), Replicate()
    plan = {"embeddings": RowwiseParallel(input_layouts=whole), "up": ColwiseParallel(output_layouts=whole)}
    parallelize_module(network, mesh["y"], plan)
    return fully_shard(network, mesh=mesh["x"])


def part_of(whole: Tensor) -> Tensor:
    """Return what is here of a whole: a part of tensor parallelism's part."""
    for dim in ("y", "x"):
        parts = whole.chunk(mesh_of(MESH)[dim].size())
        index = mesh_of(MESH).get_local_rank(dim)
        whole = parts[index] if index < len(parts) else whole[:0]
    return whole


def parts_are_those_of_the_plan(kernel, rows: int) -> bool:
    placement, whole = kernel.plan.layout, Network(rows).up.weight.detach()
    given = under_both(rows).up.weight
    runs = placement.runs_of(placement.layout_of("up.weight", given), dist.get_rank())[0]
    planned = torch.cat([whole[start:stop] for start, stop in (*runs, (0, 0))])
    return (
        given.placements == PLACED and torch.equal(given.to_local(), planned) and torch.equal(planned, part_of(whole))
    )


@pytest.mark.parametrize("rows", ROWS)
def test_the_plan_has_the_rows_that_fully_shard_gives(pools, rows):
    assert pools(6).run(parts_are_those_of_the_plan, rows) == [True] * 6


def trained(kernel, rows: int, settings):
    """Return whole gradients and parameters of each step, and whether the parts here are parts of these wholes."""
    network = under_both(rows)
    optimizer = kernel.Muon(network.named_parameters(), lr=LR, **settings)
    data = torch.Generator().manual_seed(mesh_of(MESH).get_local_rank("x"))
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(rows, (20,), generator=data)
        (network(tokens) - 1).square().mean().backward()
        gradients = wholes({name: p.grad for name, p in network.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        parameters = wholes(dict(network.named_parameters()))
        fits = all(torch.equal(p.to_local(), part_of(parameters[name])) for name, p in network.named_parameters())
        found.append((gradients, parameters, fits))
    optimizer.check_copies()
    return found


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("settings", [{}, {"second_moment": "rows"}, {"momentum_dtype": "int8"}], ids=str)
def test_training_ends_as_in_one_process(kernel, pools, rows, settings):
    network = Network(rows)
    optimizer = kernel.Muon(network.named_parameters(), lr=LR, **settings)
    for step in zip(*pools(6).run(trained, rows, settings)):
        for name, p in network.named_parameters():
            p.grad = step[0][0][name]
        with one_thread(), one_by_one(kernel):
            optimizer.step()
        for _, parameters, fits in step:
            assert fits
            assert_same_network(parameters, wholes(dict(network.named_parameters())))


def error_of_another_order(kernel) -> str:
    """Return the error about a parameter that is cut by the order of its placements, "" if there is none."""
    p = nn.Parameter(distribute_tensor(torch.ones(7, 10), mesh_of(MESH), PLACED, src_data_rank=None))
    try:
        kernel.Muon([("up.weight", p)], lr=LR)
    except ValueError as error:
        return str(error)
    return ""


def test_parts_that_distribute_tensor_cut_otherwise_raise_where_sizes_differ(pools):
    errors = pools(6).run(error_of_another_order)
    assert [bool(error) for error in errors] == [False] * 4 + [True] * 2
    assert all("unlike distribute_tensor" in error for error in errors[4:])


@pytest.mark.parametrize(
    "splits, order",
    [
        [((0, 2), (0, 1)), [(1, 0, 1), (0, 0, 1)]],
        [((0, 2), (1, 1), (0, 1)), [(1, 1, 1), (2, 0, 1), (0, 0, 1)]],  # FSDP2, experts' and tensor parallelism
        [(None, (0, 2), (0, 1)), [(2, 0, 1), (1, 0, 1)]],  # with replicas
        [((0, 6), (0, 1), (0, 1)), [(1, 0, 1), (2, 0, 1), (0, 0, 1)]],
        [((0, 6), (0, 2), (0, 1)), [(2, 0, 1), (1, 0, 1), (0, 0, 1)]],
        [((0, 1), (0, 1)), [(0, 0, 1), (1, 0, 1)]],
        [((0, 2), (1, 1)), [(0, 0, 2), (1, 1, 1)]],
        [((0, 4), (0, 1)), [(0, 0, 4), (1, 0, 1)]],
    ],
    ids=str,
)
def test_a_split_by_the_number_of_later_parts_cuts_them(kernel, splits, order):
    sizes = (5, 3, 2)[-len(splits) :]
    assert kernel.plan.runs.in_order_of_cuts(splits, sizes) == order
