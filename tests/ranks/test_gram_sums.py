"""Matrices in parts along their long side, whose Gram matrix ranks sum: as in one process but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks.test_messages import Counted
from tests.support.inside import muon_settings, plan_of
from tests.support.pieces import Trained, put_together
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Layout,
    Spec,
    assert_same,
    bits_equal,
    model,
    part_of,
    train,
    train_alone,
)

LONG = {
    "columns of wide ones": ((6, 400), LAYOUTS["columns"]),
    "rows of tall ones": ((333, 7), LAYOUTS["rows"]),
    "columns twice": ((5, 301), LAYOUTS["strided columns"]),
    "experts": ((4, 6, 500), Layout((2, 2), ("0", "2"))),
    "columns of a convolution": ((6, 40, 3, 3), LAYOUTS["columns"]),
}
DIVERGING = (9.0, -20.0, 12.0)
SUMMED = {"sum_gram": True, "ns_dtype": "float32"}


def case_on(shape, layout, **changes) -> Case:
    name = "layers.{}.experts.up.weight" if len(shape) == 3 else "layers.{}.up.weight"
    specs = tuple(Spec(name.format(i), shape, layout) for i in range(3))
    settings = {"lr": 0.02, "expert_keys": ["experts"], **SUMMED, **changes.pop("settings", {})}
    return Case(specs, settings, **{"steps": 4, **changes})


def explained(kernel, case: Case):
    params = [(spec.name, part_of(case, i)) for i, spec in enumerate(case.specs)]
    optimizer = kernel.Muon(params, is_muon=lambda name, p: True, **muon_settings(kernel, case.settings))
    explanation = optimizer.explain()
    assert ("Gram matrices" in str(explanation)) == bool(plan_of(optimizer).sums)
    return [(row.kernel, row.owner) for row in explanation.rows]


def assert_close_to_alone(kernel, pools, case: Case, job=train) -> None:
    results = put_together(pools(4).run(job, case))
    assert_close(kernel, case, results, train_alone(kernel, case, results[0].holders, pools.device))


def assert_close(kernel, case: Case, results: Sequence[Trained], alone: Trained) -> None:
    """What ranks and one process end with differs by rounding alone, and momentum not at all."""
    for result in results:
        for i, (state, reference) in enumerate(zip(result.state, alone.state)):
            assert bits_equal(state["momentum_buffer"], reference["momentum_buffer"])
            p, q = (exact(kernel, trained, i) for trained in (result, alone))
            # An update has root mean square 0.2 lr. float32 rounds each of the iteration's 15 products to 2**-24, which
            # the schedule amplifies by up to the product of its first coefficients, about 2**8; here two ways differ.
            moved = 0.2 * case.settings["lr"] * case.steps * q.numel() ** 0.5
            assert (p - q).norm() <= 2**-24 * 15 * 2**8 * 2 * moved + 2**-24 * case.steps * q.norm(), case.specs[i]


def exact(kernel, trained: Trained, i: int) -> torch.Tensor:
    """Return a float32 parameter, or the float32 value whose halves are a parameter and its remainder."""
    p, state = trained.parameters[i], trained.state[i]
    if "remainder" not in state:
        return p
    return kernel.kernels.master_weights.joined(p, kernel.parameters.state.integers(state["remainder"]))


# Ranks that have other experts have no word in whether these have a gradient.
MISSING = [(name, missing) for name in LONG for missing in ("nowhere", "everywhere")]
MISSING += [(name, missing) for name in LONG if name != "experts" for missing in ("here and there", "all but one")]


@pytest.mark.parametrize("name, missing", MISSING)
def test_summed_matrices_end_as_in_one_process_up_to_rounding(kernel, pools, name, missing):
    assert_close_to_alone(kernel, pools, case_on(*LONG[name], missing=missing))


@pytest.mark.parametrize("name", LONG)
def test_master_weights_of_summed_matrices_end_there_too(kernel, pools, name):
    """bfloat16 parameters with their lower halves, as close as float32 parameters."""
    settings = {"master_weights": "split", "momentum_dtype": "float32"}
    case = case_on(*LONG[name], settings=settings, dtype=torch.bfloat16, missing="everywhere")
    assert_close_to_alone(kernel, pools, case)


def train_at_any_cost(kernel, case: Case):
    """Train with sums for all matrices that can be summed, however small they are."""
    with mock.patch.object(kernel.plan.gram_sums, "_is_cheaper", lambda *_: True):
        return train(kernel, case)


@pytest.mark.parametrize("missing", ["nowhere", "here and there", "all but one"])
@pytest.mark.parametrize("shape, layout", [((9, 3), "rows"), ((2, 5), "columns"), ((1, 6), "strided columns")])
def test_ranks_with_empty_parts_take_part_in_sums(kernel, pools, shape, layout, missing):
    assert_close_to_alone(kernel, pools, case_on(shape, LAYOUTS[layout], missing=missing), train_at_any_cost)


def test_ranks_with_empty_parts_of_float64_parameters_take_part_in_sums(kernel, pools):
    """Directions and their norms are float64 then, whatever the dtype of the iteration."""
    assert_close_to_alone(kernel, pools, case_on((9, 3), LAYOUTS["rows"], dtype=torch.float64), train_at_any_cost)


@pytest.mark.parametrize("name", LONG)
def test_bits_depend_on_neither_chunk_size_nor_chunks_in_flight(kernel, pools, name):
    case = case_on(*LONG[name], missing="here and there")
    results = [
        put_together(pools(4).run(train, case._replace(settings={**case.settings, **changes})))
        for changes in ({}, {"chunk_bytes": 1, "chunks_in_flight": 1}, {"chunk_bytes": 10_000, "chunks_in_flight": 5})
    ]
    for result in (rank for ranks in results for rank in ranks):
        assert_same(case, result, results[0][0])


@pytest.mark.parametrize("name", LONG)
def test_explain_says_what_is_summed(pools, name):
    for rows in pools(4).run(explained, case_on(*LONG[name])):
        assert all("gram_float32" in kernel and "summed over" in kernel and owner == "all" for kernel, owner in rows)


def exhausted(parts):
    """Return the dtypes of what a rank without others would sum, and its columns of the factors."""
    dtypes = []
    while True:
        try:
            dtypes.append(next(parts).dtype)
        except StopIteration as end:
            return dtypes, end.value[0]


@pytest.mark.parametrize("shape", [(3, 6, 400), (2, 1, 50)], ids=str)
def test_gram_matrices_in_half_precision_are_summed_in_float32_and_multiplied_as_they_are_in_one_process(kernel, shape):
    """A rank that has all columns gets the bits of one process: between sum and products nothing else is rounded."""
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    iteration = kernel.iteration.choose_iteration(torch.device("cpu"), torch.float16, shape[1:], schedule, "gram")
    G = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    counts = torch.ones(len(G), dtype=torch.float64)
    dtypes, columns = exhausted(kernel.polar.factors.factor_of_parts(G, counts, iteration, 1e-7))
    assert dtypes == [torch.float64, *[torch.float32] * len(iteration.windows)]
    assert bits_equal(columns, kernel.polar.factors.polar_factors(G, iteration, 1e-7))


def owners(kernel, case: Case):
    """Return what `explain` says of each parameter's owner, and all owners of its matrices."""
    named = [(spec.name, part_of(case, i)) for i, spec in enumerate(case.specs)]
    optimizer = kernel.Muon(named, is_muon=lambda *_: True, **muon_settings(kernel, case.settings))
    plan = plan_of(optimizer)
    shared = plan.shared_work()
    of_matrices = [{shared[matrix.key].owner for matrix in matrices} for matrices in plan.matrices]
    return list(zip((row.owner for row in optimizer.explain().rows), of_matrices))


@pytest.mark.parametrize("name", ["experts", "columns of wide ones"])
def test_explain_names_the_owner_of_what_is_not_summed_or_says_that_there_are_several(pools, name):
    for rows in pools(4).run(owners, case_on(*LONG[name], settings={"sum_gram": False})):
        assert all(said == ("several" if len(ranks) > 1 else min(ranks)) for said, ranks in rows)
        assert {said == "several" for said, _ in rows} == {name == "experts"}


STAYING = {
    "square": ((40, 40), LAYOUTS["columns"], {}),
    "along the short side": ((6, 400), LAYOUTS["rows"], {}),
    "both sides": ((6, 400), LAYOUTS["rows and columns"], {}),
    "copies": ((6, 400), LAYOUTS["replicated within"], {}),
    "not asked for": ((6, 400), LAYOUTS["columns"], {"sum_gram": False}),
    "a schedule that no Gram iteration survives": ((6, 400), LAYOUTS["columns"], {"ns_coefficients": DIVERGING}),
    "whole rows are equalized": ((6, 400), LAYOUTS["columns"], {"equalize": "rows"}),
    "whole rows are renormalized": ((6, 400), LAYOUTS["columns"], {"renormalize": "rows"}),
    "norms of wholes are kept": ((6, 400), LAYOUTS["columns"], {"experimental_hyperball": True}),
}


@pytest.mark.parametrize("why", STAYING)
def test_unsummed_matrices_give_the_bits_of_one_process(kernel, pools, why):
    """They go to owners."""
    shape, layout, settings = STAYING[why]
    case = case_on(shape, layout, settings=settings, steps=2)
    assert all("summed" not in text for rows in pools(4).run(explained, case) for text, _ in rows)
    results = put_together(pools(4).run(train, case))
    alone = train_alone(kernel, case, results[0].holders)
    assert_same(case, results[0], alone)


def collectives_of_step(kernel, case: Case):
    params = [part_of(case, i) for i in range(len(case.specs))]
    named = [(spec.name, p) for spec, p in zip(case.specs, params)]
    optimizer = kernel.Muon(named, is_muon=lambda *_: True, **muon_settings(kernel, case.settings))
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = part_of(case._replace(seed=step + 1), i).data
        with Counted() as counted:
            optimizer.step()
    windows = {len(batch.first.iteration.windows) for batches in plan_of(optimizer).sums for batch in batches}
    said = str(optimizer.explain())
    return [name for name, *_ in counted.calls], windows, sum(map(len, plan_of(optimizer).sums)), said


@pytest.mark.parametrize("name", LONG)
def test_batch_sums_norms_once_and_grams_once_per_window(pools, name):
    for calls, (windows,), batches, said in pools(4).run(collectives_of_step, case_on(*LONG[name])):
        # And one by which ranks agree about settings.
        assert calls == ["all_reduce"] * (1 + batches * (1 + windows))
        assert f"ranks sum, {batches * (1 + windows)} messages" in said


@pytest.mark.parametrize("zero, spoiled", [((0, 2), None), ((), 1)])
def test_zero_gradients_decay_and_nan_stays_in_its_matrix(kernel, pools, zero, spoiled):
    case = case_on(*LONG["columns of wide ones"], zero=zero, spoiled=spoiled, steps=1)
    for result in put_together(pools(4).run(train, case)):
        alone = train_alone(kernel, case, result.holders)
        for i, (p, q) in enumerate(zip(result.parameters, alone.parameters)):
            if i in zero:
                assert bits_equal(p, q)
            assert bool(p.isnan().all()) == (i == spoiled) and bool(p.isnan().any()) == (i == spoiled)


def move_lr_alone(kernel, case: Case):
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = kernel.Muon(
        [(spec.name, p) for spec, p in zip(case.specs, params)], **muon_settings(kernel, case.settings)
    )
    before = None
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = part_of(case._replace(seed=step + 1), i).data
        if step and dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] = 0.5
        before = [p.detach().clone() for p in params]
        if step:
            with pytest.raises(RuntimeError, match="ranks had different settings"):
                optimizer.step()
        else:
            optimizer.step()
    return all(torch.equal(p.to_local(), old.to_local()) for p, old in zip(params, before))


def test_setting_changed_on_one_rank_moves_nothing(pools):
    assert all(pools(4).run(move_lr_alone, case_on(*LONG["columns of wide ones"])))


def test_summed_and_other_matrices_mix(kernel, pools):
    long = (Spec(f"long.{i}.up.weight", (4, 200 + i), LAYOUTS["columns"]) for i in range(3))
    specs = (*model(LAYOUTS["columns"], seed=3), *long)
    settings = {**SUMMED, "chunk_bytes": 1000, "lr": 0.02, "eps": 5.0}  # above the norms of most directions
    case = Case(specs, settings, missing="here and there", steps=4)
    assert_close_to_alone(kernel, pools, case)
