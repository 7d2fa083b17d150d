"""Gradients of float64 parameters that float32 cannot hold: ranks pack and send them as float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.ranks.test_gram_sums import assert_close, case_on, train_at_any_cost
from tests.ranks.test_teams import FOUR, TEAMS, long_ones, train_in_teams
from tests.support import sharded_models
from tests.support.pieces import put_together
from tests.support.sharded_models import LAYOUTS, Case, train, train_alone, whole_gradient


def with_large_gradients():
    """Return a patch by which each gradient is 2**200 times as large; float32 ends at 2**128."""
    return mock.patch.object(sharded_models, "whole_gradient", lambda *of: 2.0**200 * whole_gradient(*of))


def train_on_large_gradients(kernel, case: Case, job):
    with with_large_gradients():
        return job(kernel, case)


@pytest.mark.parametrize(
    "job, case",
    [
        (train, case_on((24, 16), LAYOUTS["rows"])),
        (train_at_any_cost, case_on((6, 400), LAYOUTS["columns"])),
        (train_in_teams, Case(long_ones(FOUR), TEAMS, steps=3)),
    ],
    ids=["owners", "sums", "teams"],
)
def test_directions_that_only_float64_can_hold_are_updated_as_in_one_process(kernel, pools, job, case):
    case = case._replace(dtype=torch.float64)
    results = put_together(pools(4).run(train_on_large_gradients, case, job))
    with with_large_gradients():
        alone = train_alone(kernel, case, results[0].holders, pools.device)
    assert all(p.isfinite().all() for p in alone.parameters)
    assert_close(kernel, case, results, alone)
