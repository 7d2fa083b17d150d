"""Sharded parameters that are frozen take no part, and join on all ranks when they are trained."""

from __future__ import annotations

import pytest

from tests.support.backends import on_every_backend
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    bits_equal,
    model,
    muon,
    part_of,
    sharded,
    whole,
    whole_gradient,
    whole_parameter,
)

pytestmark = on_every_backend()


def train_frozen(kernel, case: Case, frozen: int, thawed: int):
    """Train with one parameter frozen until step `thawed`; return wholes, and whether it has state."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    params[frozen].requires_grad_(False)
    optimizer = muon(kernel, case, params)
    for step in range(1, case.steps + 1):
        params[frozen].requires_grad_(step >= thawed)
        for i, (spec, p) in enumerate(zip(case.specs, params)):
            p.grad = sharded(whole_gradient(case, step, i), spec.layout).data if p.requires_grad else None
        optimizer.step()
    return [whole(p) for p in params], params[frozen] in optimizer.state


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_frozen_parameter_stays_and_has_no_state(pools, layout):
    case = Case(model(layout, seed=5), steps=2)
    for params, has_state in pools(4).run(train_frozen, case, 2, 9):
        assert not has_state
        for i, p in enumerate(params):
            assert bits_equal(p, whole_parameter(case, i)) == (i == 2)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_frozen_parameter_joins_when_it_is_trained(pools, layout):
    case = Case(model(layout, seed=5), steps=2)
    for params, has_state in pools(4).run(train_frozen, case, 2, 2):
        assert has_state
        assert not any(bits_equal(p, whole_parameter(case, i)) for i, p in enumerate(params))
