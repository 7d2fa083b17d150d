"""Whatever a model has in it, and however it lies on ranks, steps give the bits that one process gets."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.backends import on_every_backend
from tests.support.pieces import Pieces, put_together
from tests.support.random_models import laid_out_anew, random_case
from tests.support.sharded_models import (
    Case,
    assert_as_alone,
    assert_same,
    built,
    pieces_of,
    sharded,
    take_steps,
    train_alone,
    whole,
    wholes,
)

pytestmark = on_every_backend()
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_gives_the_bits_of_one_process(kernel, pools, seed):
    assert_as_alone(kernel, pools, random_case(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_goes_on_in_other_layouts(kernel, pools, seed):
    """With its state, and the bits of a run that was never interrupted."""
    case = random_case(seed)
    # In another layout a parameter has other holders, so all or none of them have a gradient.
    case = case._replace(missing="nowhere" if case.missing == "nowhere" else "everywhere")
    other, before = laid_out_anew(case), random.Random(seed).randint(1, case.steps - 1)
    results = put_together(pools(4).run(trained_in_two_layouts, case, other, before))
    alone = train_alone(kernel, other, results[0].holders, pools.device)
    for result in results:
        assert_same(other, result, alone)


def trained_in_two_layouts(kernel, case: Case, other: Case, before: int) -> Pieces:
    """Take `before` steps in the layouts of one case, and the rest in those of the other, with a state of wholes."""
    first, optimizer = built(kernel, case)
    take_steps(case, first, optimizer, range(1, before + 1))
    saved = optimizer.state_dict()
    params, optimizer = built(kernel, other)
    with torch.no_grad():
        for spec, p, value in zip(other.specs, params, map(whole, first)):
            p.copy_(sharded(value, spec.layout))
    optimizer.load_state_dict({**saved, "state": {number: wholes(state) for number, state in saved["state"].items()}})
    take_steps(other, params, optimizer, range(before + 1, case.steps + 1))
    return pieces_of(other, params, optimizer)
