"""A matrix of which each rank has a copy is worked on alone where sharing the work would not make a step shorter."""

from __future__ import annotations

import pytest

from tests.ranks.test_gram_sums import collectives_of_step
from tests.support.backends import on_every_backend
from tests.support.inside import plan_of
from tests.support.pieces import put_together
from tests.support.sharded_models import Case, Layout, Spec, assert_same, muon, part_of, train, train_alone

SHAPE = (384, 400)  # so large that copies are sent where that pays
COPIES = Layout((4,), ("r",))
EXPERTS = Layout((2, 2), ("r", "0"))
KEYS = {"expert_keys": ["experts"], "ns_steps": 2}
REPEATED = {
    "one matrix for four ranks": Spec("layers.0.up.weight", SHAPE, COPIES),
    "an expert for each rank of a copy": Spec("experts.up.weight", (2, *SHAPE), EXPERTS),
}
SHARED = {"two experts for each rank of a copy": Spec("experts.up.weight", (4, *SHAPE), EXPERTS)}


@pytest.mark.parametrize("name", REPEATED)
def test_work_that_does_not_get_shorter_is_repeated_and_not_sent(pools, name):
    for calls, _, _, said in pools(4).run(collectives_of_step, Case((REPEATED[name],), KEYS)):
        assert calls == ["all_reduce"]  # by which ranks agree about settings
        assert "among" not in said and "owner" not in said


def holders_of_local_work(kernel, case: Case):
    """Return, for each matrix that this rank works on alone, the ranks that hold it."""
    optimizer = muon(kernel, case, [part_of(case, i) for i in range(len(case.specs))])
    return [matrix.holders for batch in plan_of(optimizer).batches for matrix in batch.matrices]


@pytest.mark.parametrize("name", REPEATED)
def test_a_rank_repeats_the_work_on_what_it_holds_alone(pools, name):
    """Not on the experts of others in its copy."""
    for rank, matrices in enumerate(pools(4).run(holders_of_local_work, Case((REPEATED[name],), KEYS))):
        assert [rank in holders for holders in matrices] == [True]


@pytest.mark.parametrize("name", SHARED)
def test_work_that_gets_shorter_is_shared(pools, name):
    for calls, _, _, said in pools(4).run(collectives_of_step, Case((SHARED[name],), KEYS)):
        assert "among 4 ranks" in said and len(calls) > 1


@on_every_backend()
@pytest.mark.parametrize("name", {**REPEATED, **SHARED})
def test_bits_are_those_of_one_process(kernel, pools, name):
    case = Case(({**REPEATED, **SHARED}[name],), KEYS, steps=2)
    results = put_together(pools(4).run(train, case))
    assert_same(case, results[0], train_alone(kernel, case, results[0].holders, pools.device))
