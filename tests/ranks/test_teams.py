"""Matrices that neighbouring ranks work on together: as in one process but for rounding, where that is shorter."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from tests.ranks.test_gram_sums import assert_close_to_alone
from tests.ranks.test_plan import even_plan
from tests.support import inside
from tests.support.backends import on_every_backend
from tests.support.inside import muon_settings
from tests.support.pairwise import in_turn
from tests.support.pieces import put_together
from tests.support.sharded_models import LAYOUTS, Case, Layout, Spec, assert_same, model, part_of, train, train_alone

TEAMS = {"ranks_per_matrix": 2, "ns_dtype": "float32", "lr": 0.02}
FOUR = Layout((4,), ("0",))
SPREAD = Layout((2, 2), ("0", "r"))  # whose copies have no two neighbours


# Long ones, whose singular values are far from zero, so that a Gram matrix keeps the digits of all of them; and a small
# square one, of whose digits it keeps enough.
FORMING = [name for name in LAYOUTS if name != "replicated within"]
SHAPES = ((8, 8), (6, 40), (41, 6), (8, 45), (30, 4), (10, 57), (6, 40), (64, 10))


def long_ones(layout: Layout) -> tuple[Spec, ...]:
    return tuple(Spec(f"layers.{i}.up.weight", shape, layout) for i, shape in enumerate(SHAPES))


def teams_cost_nothing(kernel):
    """Return a patch by which teams pay for matrices as small as these."""
    return mock.patch.object(kernel.plan.teams, "team_cost", lambda *_: 1)


def train_in_teams(kernel, case: Case):
    with teams_cost_nothing(kernel):
        return train(kernel, case)


def explained_in_teams(kernel, case: Case):
    with teams_cost_nothing(kernel):
        return explained(kernel, case)


def explained(kernel, case: Case):
    params = [(spec.name, part_of(case, i)) for i, spec in enumerate(case.specs)]
    optimizer = kernel.Muon(params, is_muon=lambda name, p: True, **muon_settings(kernel, case.settings))
    teams = [(team.ranks, team.owner) for chunk in inside.chunks_of(optimizer) for team, _ in chunk.teams]
    for exchange in inside.plan_of(optimizer).exchanges:
        for chunk in exchange.chunks:  # who waits for a team does not tell a rate of FLOPs in a profile
            assert (chunk.profiled_as == "muon.orthogonalize") == bool(chunk.teams)
            assert all(team.work_bytes < exchange.held_bytes() for team, _ in chunk.teams)
    return [row.kernel for row in optimizer.explain().rows], teams


@on_every_backend()
@pytest.mark.parametrize("name, missing", in_turn(FORMING, ["nowhere", "here and there", "everywhere"]))
def test_teams_end_as_one_process_up_to_rounding(kernel, pools, name, missing):
    """Of 8 x 45 one member has 22 columns and the other 23. Small copies are nobody else's work."""
    specs = (*long_ones(LAYOUTS[name]), Spec("layers.20.up.weight", (256, 1200), LAYOUTS[name]))
    assert_close_to_alone(
        kernel, pools, Case(specs, {**TEAMS, "chunk_bytes": 900}, steps=3, missing=missing), train_in_teams
    )


@on_every_backend()
def test_teams_equalize_and_renormalize_whole_matrices(kernel, pools):
    settings = {**TEAMS, "equalize": "rows", "renormalize": "columns"}
    assert_close_to_alone(kernel, pools, Case(long_ones(FOUR), settings, steps=3), train_in_teams)


@on_every_backend()
def test_teams_divide_by_eps_where_that_is_larger_than_a_norm(kernel, pools):
    assert_close_to_alone(kernel, pools, Case(long_ones(FOUR), {**TEAMS, "eps": 5.0}, steps=3), train_in_teams)


@on_every_backend()
def test_teams_keep_norms_of_whole_matrices(kernel, pools):
    settings = {**TEAMS, "experimental_hyperball": True, "second_moment": "rows"}
    assert_close_to_alone(kernel, pools, Case(long_ones(FOUR), settings, steps=3), train_in_teams)


@on_every_backend()
def test_matrices_that_are_orthogonalized_twice_have_no_team(kernel, pools):
    case = Case(long_ones(FOUR), {**TEAMS, "equalize": "experimental_aurora"}, steps=3)
    assert all(not teams for _, teams in pools(4).run(explained_in_teams, case))


def train_in_teams_of_last_owners(kernel, case: Case):
    owners, take = kernel.plan.owners.Owners, kernel.plan.owners.Owners.take_together
    with mock.patch.object(owners, "take_together", lambda *arguments: take(*arguments)[::-1]):
        return train_in_teams(kernel, case)


@on_every_backend()
def test_any_rank_of_a_team_may_own(pools):
    """Bits are the same as where the first one does, as it does among equally loaded ranks."""
    case = Case(long_ones(FOUR), TEAMS, steps=3)
    first, last = (put_together(pools(4).run(job, case)) for job in (train_in_teams, train_in_teams_of_last_owners))
    for one, other in zip(first, last):
        assert_same(case, one, other)


@on_every_backend()
@pytest.mark.parametrize("size", [2, 4])
def test_bits_depend_on_the_size_of_the_team_alone(pools, size):
    """Not on chunks, nor on how the matrices lie."""
    settings = {**TEAMS, "ranks_per_matrix": size}
    results = [
        put_together(pools(4).run(train_in_teams, Case(long_ones(LAYOUTS[name]), {**settings, **changes}, steps=3)))
        for name in ("rows", "columns and rows")
        for changes in ({}, {"chunk_bytes": 1, "chunks_in_flight": 1}, {"chunk_bytes": 2000, "chunks_in_flight": 5})
    ]
    for ranks in results:
        for result in ranks:
            assert_same(Case(long_ones(FOUR)), result, results[0][0])


@on_every_backend()
@pytest.mark.parametrize("size, teams", [(2, {(0, 1), (2, 3)}), (4, {(0, 1, 2, 3)}), (3, {(0, 1, 2)}), (8, set())])
def test_teams_are_neighbours_and_explained(pools, size, teams):
    """A team of three begins at a multiple of it, and 4 and 5 are not there."""
    case = Case(long_ones(FOUR), {**TEAMS, "ranks_per_matrix": size, "chunk_bytes": 500})
    results = pools(4).run(explained_in_teams, case)
    assert {ranks for _, local_teams in results for ranks, _ in local_teams} == teams
    for rank, (kernels, local_teams) in enumerate(results):
        assert all(rank in ranks and owner in ranks for ranks, owner in local_teams)
        assert all((f"by {size} ranks together" in kernel) == bool(teams) for kernel in kernels)


WITHOUT = {
    "not asked for": (FOUR, {"ranks_per_matrix": 1}),
    "copies without neighbours": (SPREAD, {}),
    "a dtype in which the Gram iteration diverges": (FOUR, {"ns_dtype": "bfloat16"}),
    "a schedule that it does not survive": (FOUR, {"ns_coefficients": (9.0, -20.0, 12.0)}),
}


@on_every_backend()
@pytest.mark.parametrize("why", WITHOUT)
def test_without_teams_bits_are_those_of_one_process(kernel, pools, why):
    layout, settings = WITHOUT[why]
    case = Case(model(layout, seed=6), {**TEAMS, **settings}, steps=2)
    results = put_together(pools(4).run(train_in_teams, case))
    assert_same(case, results[0], train_alone(kernel, case, results[0].holders, pools.device))


def test_small_matrices_are_nobody_elses_work(pools):
    """Where the model of costs is left as it is: to send columns takes longer than to multiply them."""
    case = Case(model(FOUR, seed=2), TEAMS)
    for kernels, teams in pools(4).run(explained, case):
        assert teams == [] and not any("together" in kernel for kernel in kernels)


# Rows, columns and count: the matrices of Llama 70B.
LLAMA_70B = [(8192, 8192, 160), (1024, 8192, 160), (28672, 8192, 160), (8192, 28672, 80)]


def llama(kernel, ranks: int, copies: int):
    """Return the matrices of Llama 70B on so many ranks, whose products run in float16."""
    matrices, schedule = [], kernel.schedules.resolve_schedule("polar_express", 5)
    everybody = tuple(range(ranks))
    for rows, cols, count in LLAMA_70B:
        layout = inside.layout(kernel, (rows, cols), (copies, ranks // copies), everybody, (None, (0, 1)))
        shards = inside.shards(kernel, inside.matrix_view(kernel, (rows, cols)), layout)
        cost = kernel.plan.costs.owners_cost(rows, cols, 5)
        some = [inside.matrix(kernel, len(matrices) + i, 0, shards, cost) for i in range(count)]
        for matrix in some:
            settings = {"sharers": everybody, "schedule": schedule, "device": torch.device("cpu")}
            settings["circumstances"] = kernel.kernels.circumstances.ALONE
            vars(matrix.parameter).update(settings, work_dtype=torch.float16)
        matrices += some
    return matrices


@pytest.mark.parametrize("ranks, shared", [(256, False), (512, False), (1024, True), (2048, True), (4096, True)])
def test_teams_are_formed_where_a_step_gets_shorter(kernel, ranks, shared):
    """On 1,024 ranks one matrix of 28672 x 8192 takes longer than all work by teams of four, on 512 it does not."""
    matrices, costs = llama(kernel, ranks, max(ranks // 256, 1)), kernel.plan.costs
    chosen = kernel.plan.teams.with_teams(matrices, 4)

    def cost(some) -> float:
        work, largest = sum(matrix.work for matrix in some), max(matrix.cost for matrix in some)
        sending = costs.FLOPS_OF_AN_ELEMENT * 28672 * 8192
        counts = (count for count in (1, 2, 4, 8, 16) if 256 * count <= ranks)
        return min(max(work / (256 * count), largest) + count * sending for count in counts)

    assert any(matrix.team_size > 1 for matrix in chosen) == shared
    assert [matrix.key for matrix in chosen] == [matrix.key for matrix in matrices]
    assert cost(chosen) <= (0.75 if shared else 1.0) * cost(matrices)
    # Those that are shared cost most, and to share those of one size fewer or more takes longer.
    by_cost = sorted({matrix.cost for matrix in matrices}, reverse=True)
    shared_matrices = {matrix.key: kernel.plan.teams._shared(matrix, 4) for matrix in matrices}
    for least in [*by_cost, by_cost[0] + 1]:
        other = [shared_matrices[matrix.key] if matrix.cost >= least else matrix for matrix in matrices]
        assert cost(chosen) <= cost(other) * (1 + 1e-9)


def test_a_team_that_shortens_nothing_is_not_formed(kernel, monkeypatch):
    matrices = llama(kernel, 256, 1)[:1]
    monkeypatch.setattr(kernel.plan.teams, "team_cost", lambda *_: matrices[0].cost)
    assert kernel.plan.teams.with_teams(matrices, 4) == matrices


def test_more_copies_work_together_on_what_teams_do(kernel):
    """Six equal matrices are worth two of eight copies; four, if each keeps two ranks as busy as one before."""
    model, _ = even_plan(kernel, Layout((8, 4), ("r", "0")), 6)
    cost = 16 * kernel.plan.costs.FLOPS_OF_AN_ELEMENT * 64 * 128
    for size, copies in ((1, 2), (2, 4)):
        matrices = [dataclasses.replace(matrix, cost=cost, team_size=size) for matrix in model.matrices]
        ((ranks, _),) = kernel.plan.exchanges.replica_groups(matrices, 0).items()
        assert len(ranks) == 4 * copies


def test_what_is_in_other_numbers_of_copies_is_exchanged_apart(kernel):
    """A step takes as long as for both one after the other."""
    one, two, cost = llama(kernel, 256, 1)[:9], llama(kernel, 512, 2)[:9], kernel.plan.teams._step_cost
    assert cost([*one, *two]) == pytest.approx(cost(one) + cost(two), rel=1e-12)


@pytest.mark.parametrize("ranks, has_teams", [((0, 1, 2, 3), True), ((0, 1, 3, 4), False)], ids=str)
def test_each_copy_needs_a_team_of_its_own(kernel, ranks, has_teams):
    """As copies that work together may be any of them. A team of two begins at an even rank."""
    layout = inside.layout(kernel, (8, 6), (2, 2), ranks, (None, (0, 1)))
    assert kernel.plan.teams._has_teams(layout, ranks, 2) == has_teams


def test_a_team_has_its_ranks_in_order_whichever_of_them_owns(kernel, monkeypatch):
    """So it needs one process group."""
    monkeypatch.setattr(kernel.plan.teams, "plan_batches", lambda matrices: matrices)
    team = kernel.plan.teams.team_of(llama(kernel, 256, 1)[0], (3, 2))
    assert (team.ranks, team.owner) == ((2, 3), 3)
