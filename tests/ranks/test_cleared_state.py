"""State that all ranks take away begins anew on all of them, as with a new optimizer."""

from __future__ import annotations

import pytest

from tests.support.backends import on_every_backend
from tests.support.sharded_models import LAYOUTS, Case, bits_equal, model, muon, part_of, set_gradient_parts, whole

pytestmark = on_every_backend()


def train(kernel, case: Case, begin_anew):
    """Train, with `begin_anew(optimizer, make)` in the middle as the optimizer of the rest; return whole parameters."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    for step in range(1, case.steps + 1):
        if step == 2:
            optimizer = begin_anew(optimizer, lambda: muon(kernel, case, params))
        set_gradient_parts(case, params, step)
        optimizer.step()
    return [whole(p) for p in params]


def with_cleared_state(optimizer, make):
    optimizer.state.clear()
    return optimizer


def with_its_state(optimizer, make):
    return optimizer


def with_a_new_one(optimizer, make):
    return make()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_cleared_state_begins_anew_on_all_ranks(pools, layout):
    case = Case(model(layout, seed=5), steps=3)
    cleared, expected, going_on = (
        pools(4).run(train, case, anew) for anew in (with_cleared_state, with_a_new_one, with_its_state)
    )
    for rank in range(4):
        assert all(map(bits_equal, cleared[rank], expected[rank]))
        assert not all(map(bits_equal, going_on[rank], expected[rank]))
