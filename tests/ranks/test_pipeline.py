"""The order in which chunks of an exchange, work on them, and work of this process alone take turns."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.inside import plan_of
from tests.support.pieces import mesh_of
from tests.support.sharded_models import bits_equal, whole


def order(kernel, chunks: int, in_flight: int) -> list[str]:
    """Return what is begun, in its order: gathers g, work w, and descents d of each chunk, and local work.

    After the chunks come those of another exchange, numbered from 100.
    """
    events: list[str] = []

    def chunk(number: int):
        events.append(f"g{number}")
        yield
        events.append(f"w{number}")
        yield
        events.append(f"d{number}")

    exchanges = [map(chunk, range(chunks)), map(chunk, range(100, 100 + chunks))]
    rounds = kernel.step.pipeline.advanced(exchanges, in_flight)
    next(rounds, None)
    events.append("local")
    for _ in rounds:
        pass
    return events


@pytest.mark.parametrize("chunks", [0, 1, 2, 7])
@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_local_work_hides_the_first_gather(kernel, chunks, in_flight):
    events = order(kernel, chunks, in_flight)
    assert events.index("local") == min(chunks, 1)
    numbers = [*range(chunks), *range(100, 100 + chunks)]
    assert sorted(events) == sorted(["local", *(f"{stage}{k}" for k in numbers for stage in "gwd")])


def test_exchange_begins_when_the_one_before_has_ended(kernel):
    events = order(kernel, 3, 5)
    assert events.index("d2") < events.index("g100")


@pytest.mark.parametrize("in_flight", [2, 3, 9])
def test_work_overlaps_the_next_gather_and_the_last_results(kernel, in_flight):
    events = order(kernel, 6, in_flight)
    for k in range(5):
        assert events.index(f"g{k + 1}") < events.index(f"w{k}")
        assert events.index(f"w{k + 1}") < events.index(f"d{k}")


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_at_most_in_flight_plus_one_chunks_are_started(kernel, in_flight):
    under_way = 0
    for event in order(kernel, 12, in_flight):
        under_way += {"g": 1, "d": -1}.get(event[0], 0)
        assert under_way <= in_flight + 1


def steps_on_two_meshes(kernel, sum_gram: bool):
    """Some parameters lie on all ranks, some on two of them; neighbours have them in one order and the other."""
    pairs, world = mesh_of((2, 2))["y"], mesh_of((4,))
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 400), mesh, [Shard(1)])) for mesh in (pairs, world)]
    named = [("a.weight", params[0]), ("b.weight", params[1])]
    copies = [nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()])) for mesh in (pairs, world)]
    named += zip(("a.bias", "b.bias"), copies)
    exchange = kernel.ExchangeOptions(sum_gram=sum_gram)
    optimizer = kernel.Muon(named[:: 1 - 2 * (dist.get_rank() % 2)], lr=0.1, ns_dtype="float32", exchange=exchange)
    assert bool(plan_of(optimizer).sums) == sum_gram != bool(plan_of(optimizer).exchanges)
    for p in (*params, *copies):
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.check_copies()
    return all(not bits_equal(whole(p), torch.ones(4, 400)) for p in params)


@pytest.mark.parametrize("sum_gram", [False, True])
def test_ranks_meet_in_two_exchanges_in_one_order(pools, sum_gram):
    """Or in two sums; and where they compare settings and copies."""
    assert pools(4).run(steps_on_two_meshes, sum_gram) == [True] * 4
