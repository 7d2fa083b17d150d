"""Gradients of sharded parameters that are missing, zero, not finite or released."""

from __future__ import annotations

import pytest
import torch

from tests.support.backends import on_every_backend
from tests.support.pieces import put_together
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Spec,
    assert_as_alone,
    bits_equal,
    model,
    muon,
    part_of,
    train,
    train_alone,
    whole_parameter,
)


@on_every_backend()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_missing_gradients_on_all_ranks_change_nothing(pools, layout):
    case = Case(model(layout, seed=5), missing="always", steps=2)
    for result in put_together(pools(4).run(train, case)):
        for i, (p, state) in enumerate(zip(result.parameters, result.state)):
            assert bits_equal(p, whole_parameter(case, i))
            assert not state["momentum_buffer"].any()


@on_every_backend()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_zero_gradients_apply_only_weight_decay(kernel, pools, layout):
    case = Case(model(layout, seed=6), {"lr": 0.1, "weight_decay": 0.5}, zero=(0, 2, 3), steps=1)
    assert_as_alone(kernel, pools, case)
    for result in put_together(pools(4).run(train, case)):
        # 1 - lr * decay, rounded, and the product once more.
        torch.testing.assert_close(result.parameters[2], 0.95 * whole_parameter(case, 2), rtol=2**-22, atol=0)


@on_every_backend()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_nan_in_one_shard_stays_in_its_matrix(kernel, pools, layout):
    """All of that matrix is NaN then, on all ranks."""
    specs = tuple(Spec(f"layers.{i}.up.weight", (12, 8 + i % 2), layout) for i in range(6))
    sound = Case(specs, {"chunk_bytes": 600}, steps=2)
    expected = train_alone(kernel, sound, [torch.zeros(spec.shape) for spec in specs], pools.device)
    for result in put_together(pools(4).run(train, sound._replace(spoiled=3))):
        assert result.parameters[3].isnan().all()
        for i in (0, 1, 2, 4, 5):
            assert bits_equal(result.parameters[i], expected.parameters[i])


def released_gradients(kernel, case: Case) -> list[bool]:
    """Return whether the gradients are gone after a step."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [p.grad is None for p in params]


@on_every_backend()
@pytest.mark.parametrize("release", [False, True])
def test_gradients_are_released_or_kept_where_their_part_is_empty_too(pools, release):
    """Of two rows or heads, ranks 2 and 3 have none."""
    settings = {"release_grads": release}
    specs = (
        Spec("0.up.weight", (2, 8), LAYOUTS["rows"]),
        Spec("1.up.weight", (2, 8), LAYOUTS["rows"], {"split_rows": (1, 1)}),
    )
    assert pools(4).run(released_gradients, Case(specs, settings)) == [[release, release]] * 4
