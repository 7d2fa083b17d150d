"""Sets of ranks that overlap, as those of tensor and of data parallelism, choose products without waiting in a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks.test_rank_tuning import kernels
from tests.support.rank_measurements import SIZE, TABLES, measuring
from tests.tuning.conftest import TableClock


def overlapping(kernel, budget: float = 60.0):
    """Each rank shares one matrix with all and one with each neighbour, of a ring; all of one size, and one not.

    On the clocks of all ranks a stage takes ten seconds. Ranks have them in such an order that by it each would wait.
    """
    rank, pairs = dist.get_rank(), [(0, 1), (1, 2), (2, 3), (0, 3)]
    meshes = [DeviceMesh("cpu", list(range(4))), *(DeviceMesh("cpu", list(pair)) for pair in pairs)]
    sizes = [SIZE, SIZE, (16, 48), SIZE, SIZE]
    named = []
    for i, (mesh, ranks) in enumerate(zip(meshes, [tuple(range(4)), *pairs])):
        if rank in ranks:
            named.append((f"layers.{i}.w", nn.Parameter(distribute_tensor(torch.ones(sizes[i]), mesh, [Shard(0)]))))
    if rank:
        named.reverse()
    clock = TableClock({**dict.fromkeys(TABLES, 1.0), TABLES[rank % 3]: 0.5})

    def ended(*stage) -> None:
        clock.time += 10.0

    with measuring(kernel, TABLES[rank % 3], clock=clock) as measured:
        optimizer = kernel.Muon(named, ns_dtype=torch.bfloat16)
        optimizer.warmup(ended, budget)
        return {name: said for (name, _), said in zip(named, kernels(optimizer))}, measured


def test_overlapping_sets_agree_without_waiting_for_each_other(fresh_pool):
    """The set of all comes first; what was agreed there holds in the others."""
    reports = fresh_pool.run(overlapping)
    by_name: dict[str, set] = {}
    for said, _ in reports:
        for name, text in said.items():
            by_name.setdefault(name, set()).add(text)
    assert all(len(said) == 1 for said in by_name.values()), by_name
    assert all("measured by rank 0" in said for name, (said,) in by_name.items() if name != "layers.2.w")
    assert [measured for _, measured in reports] == [[SIZE], [(16, 48)], [], []]


def two_pairs(kernel) -> list:
    """Ranks 0 and 2 share a matrix and a smaller one, ranks 1 and 2 one of the smaller size; return what is measured.

    Of a budget of 15 seconds two stages are left when rank 1 begins, which is in one pair alone.
    """
    rank, named = dist.get_rank(), []
    clock = TableClock({**dict.fromkeys(TABLES, 1.0), "NATIVE": 0.5})
    for i, (ranks, size) in enumerate([((0, 2), SIZE), ((0, 2), (8, 16)), ((1, 2), (8, 16))]):
        mesh = DeviceMesh("cpu", list(ranks))
        if rank in ranks:
            named.append((f"layers.{i}.w", nn.Parameter(distribute_tensor(torch.ones(size), mesh, [Shard(0)]))))

    def ended(*stage) -> None:
        clock.time += 10.0

    with measuring(kernel, "NATIVE", clock=clock) as measured:
        if named:
            kernel.Muon(named, ns_dtype=torch.bfloat16).warmup(ended, 15.0)
        return measured


def test_overlapping_sets_have_one_budget(fresh_pool):
    """Rank 1 measures for the second set of ranks, after the first set has used the budget up.

    So it does not measure either what is left for want of time where it takes no part.
    """
    assert [measured for _, measured in fresh_pool.run(overlapping, 15.0)] == [[SIZE], [], [], []]
    assert fresh_pool.run(two_pairs) == [[SIZE], [], [], []]
