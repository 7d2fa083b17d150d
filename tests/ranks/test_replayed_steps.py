"""Ranks that replay graphs have the bits of those that do not; graphs are simulated where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks.test_failures import SPECS, built, everything
from tests.support.graphs_of_updates import counted_graphs
from tests.support.inside import plan_of
from tests.support.sharded_models import Case, part_of

COUNT = 3


def set_gradients(case: Case, params, lost: int | None) -> None:
    """Give parameters gradients, but on the last rank not the one that is `lost`."""
    for i, p in enumerate(params):
        is_lost = i == lost and dist.get_rank() == dist.get_world_size() - 1
        p.grad = None if is_lost else part_of(case, i).data


def replayed_and_eager(kernel, case: Case, lost: int | None):
    """Return whether all bits agree, how many graphs were replayed, and how many chains of batches there are.

    With `lost`, the last rank has no gradient of that parameter in the second step.
    """
    states = []
    with counted_graphs(kernel, "cpu") as graphs:
        for settings in {"cuda_graphs": False}, {}:
            optimizer, params = built(kernel, case._replace(settings={**case.settings, **settings}))
            optimizer.warmup(lambda *_: None, budget=0)
            before = graphs.replays
            for step in range(COUNT):
                set_gradients(case._replace(seed=step), params, lost if step == 1 else None)
                graphs.spoil(optimizer)
                optimizer.step()
            states.append(everything(optimizer, params))
    return all(map(torch.equal, *states)), graphs.replays - before, len(plan_of(optimizer).chains())


@pytest.mark.parametrize("lost", [None, 0], ids=["all gradients", "one rank lacks one"])
@pytest.mark.parametrize(
    "settings", [{}, {"release_grads": True}, {"momentum_dtype": "int8"}, {"second_moment": "rows"}], ids=str
)
def test_ranks_that_replay_have_the_bits_of_those_that_do_not(pools, settings, lost):
    results = pools(4).run(replayed_and_eager, Case(SPECS, settings), lost)
    assert all(agree for agree, _, _ in results)
    assert [replays for _, replays, _ in results] == [COUNT * chains for _, _, chains in results]
    assert sum(chains for _, _, chains in results)
