"""`warmup` connects the ranks that orthogonalize matrices together, and compiles kernels for the sizes of a step."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks.test_gram_sums import LONG, case_on
from tests.ranks.test_teams import FOUR, TEAMS, long_ones, teams_cost_nothing
from tests.support.inside import muon_settings, plan_of
from tests.support.sharded_models import Case, part_of

CASES = {
    "teams": (long_ones(FOUR), TEAMS),
    "sums of tall ones": (case_on(*LONG["rows of tall ones"]).specs, {"sum_gram": True}),
    "sums of wide ones": (case_on(*LONG["columns of wide ones"]).specs, {"sum_gram": True}),
}


def columns_orthogonalized(kernel, case: Case):
    """Return the columns that `warmup` and the step behind it orthogonalize, what it tells and sends, and the sharers.

    The warm-up is within autocast, which steps do without.
    """
    params = [part_of(case, i) for i in range(len(case.specs))]
    named = [(spec.name, p) for spec, p in zip(case.specs, params)]
    told, sent, seen = [], Counter(), {"warmup": set(), "step": set()}
    original = kernel.step.warmup.factor_of_parts

    def spy(act: str):
        def noted(wide, counts, iteration, eps):
            assert not torch.is_autocast_enabled("cpu")
            seen[act].add((tuple(wide.shape), wide.is_contiguous(), wide.dtype, len(counts), str(iteration), eps))
            return original(wide, counts, iteration, eps)

        return noted

    def counted(name, send):
        return lambda *arguments, **options: sent.update([name]) or send(*arguments, **options)

    with ExitStack() as stack:
        stack.enter_context(teams_cost_nothing(kernel))
        optimizer = kernel.Muon(named, is_muon=lambda *_: True, **muon_settings(kernel, case.settings))
        for module, act in (("warmup", "warmup"), ("team", "step"), ("gram_sums", "step")):
            stack.enter_context(mock.patch.object(getattr(kernel.step, module), "factor_of_parts", spy(act)))
        with ExitStack() as warming:
            for module, name in ((kernel.step.warmup, "all_reduce_sum_"), (dist, "all_to_all_single")):
                warming.enter_context(mock.patch.object(module, name, counted(name, getattr(module, name))))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                optimizer.warmup(lambda done, total, what: told.append(what))
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    plan = plan_of(optimizer)
    sharers = {team.ranks for team in plan.teams()} | {batches[0].ranks for batches in plan.sums}
    return seen["warmup"], seen["step"], told, sent, sharers


@pytest.mark.parametrize("name", CASES)
def test_warmup_runs_the_columns_of_a_step_once_each(pools, name):
    specs, settings = CASES[name]
    for warmed, stepped, told, sent, sharers in pools(4).run(columns_orthogonalized, Case(specs, settings)):
        assert stepped and warmed == stepped
        assert sum("this rank's columns" in what for what in told) == len(warmed)
        assert sum("share matrices" in what or "sum Gram" in what for what in told) == len(sharers)
        exchanges = sum("that exchange" in what for what in told)
        assert sent["all_to_all_single"] == exchanges
        assert sent["all_reduce_sum_"] == sum(what.startswith("connect") for what in told) - exchanges > 0
