"""What ranks that share matrices know before they measure, and learn of each other, decides what all of them take."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from tests.ranks.test_rank_tuning import kernels
from tests.support.inside import plan_of
from tests.support.rank_measurements import CPU, SIZE, fsdp, measuring
from tests.support.refusals import error_of


def one_with_a_file(kernel, act: str, holder: int):
    """One rank has measured before; returns what all run before and after a warm-up, and who measured."""
    machine, file = kernel.kernels.speeds.machine, kernel.kernels.speeds.measurement_file
    with measuring(kernel, "NATIVE_SYMMETRIC") as measured:
        if dist.get_rank() == holder:
            entry = {"m": SIZE[0], "k": SIZE[1], "products": "SINGLE"}
            table = file.Table({file.Need("cpu_products", "bfloat16", *SIZE): entry}, {})
            kernel.kernels.speeds.measurements.keep(machine.key_of(CPU), table)
        optimizer, params = fsdp(kernel, SIZE, placement=Replicate())
        before = kernels(optimizer)
        if act == "warmup":
            optimizer.warmup(lambda *_: None)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.check_copies()
        return before, kernels(optimizer), measured


def one_of_two_with_a_file(kernel, act: str):
    return [one_with_a_file(kernel, act, holder) for holder in (2, 0)]


@pytest.mark.parametrize("act", ["warmup", "step"])
def test_a_file_of_one_rank_alone_counts_only_when_agreed(fresh_pool, act):
    """Rank 0, which measures for all, does not measure again what is in its file."""
    unknown, known = zip(*fresh_pool.run(one_of_two_with_a_file, act))
    for each in unknown, known:
        assert len({str(one[:2]) for one in each}) == 1 and "by default" in each[0][0][0]
        assert ("measured by rank 0" in each[0][1][0]) == (act == "warmup")
    assert [one[2] for one in unknown] == [[SIZE] if act == "warmup" else [], [], [], []]
    assert not any(measured for *_, measured in known) and known[0][1][0].startswith("torch.mm") == (act == "warmup")


def agreed_elsewhere(kernel, other: str):
    """Ranks 0 and 3 have agreed with others, on unlike things or on the same."""
    measurements, need = (
        kernel.kernels.speeds.measurements,
        kernel.kernels.speeds.measurement_file.Need("cpu_products", "bfloat16", *SIZE),
    )
    with measuring(kernel, "SINGLE"):
        agreed = {0: "SINGLE", 3: other}.get(dist.get_rank())
        if agreed:
            entry = {"m": SIZE[0], "k": SIZE[1], "products": agreed}
            measurements.agree(
                kernel.kernels.speeds.machine.key_of(CPU), need, entry, dist.get_rank(), (dist.get_rank(), 9)
            )
        optimizer, _ = fsdp(kernel, SIZE)
        return error_of(lambda: optimizer.warmup(lambda *_: None)), kernels(optimizer)


def both_elsewhere(kernel):
    return agreed_elsewhere(kernel, "NATIVE")[0], agreed_elsewhere(kernel, "SINGLE")


def test_unlike_agreements_are_named_on_all_ranks(fresh_pool):
    """Those on the same choice are alike, whichever ranks made them."""
    for said, (error, taken) in fresh_pool.run(both_elsewhere):
        assert "24 x 40 bfloat16" in said
        assert "rank 0 has agreed with [(0, 9)]" in said and "rank 3 with [(3, 9)]" in said
        assert not error and taken == ["torch.mm bfloat16, measured by rank 0"]


def agreed_before(kernel, failed: bool):
    """One rank has agreed with others before, perhaps on what has failed on another rank since."""
    measurements, need = (
        kernel.kernels.speeds.measurements,
        kernel.kernels.speeds.measurement_file.Need("cpu_products", "bfloat16", *SIZE),
    )
    with measuring(kernel, "SINGLE") as measured:
        if dist.get_rank() == 2:
            entry = {"m": SIZE[0], "k": SIZE[1], "products": "NATIVE_SYMMETRIC"}
            measurements.agree(kernel.kernels.speeds.machine.key_of(CPU), need, entry, 7, (2, 7))
        if dist.get_rank() == 1 and failed:
            wrong = {(need.kernel, need.dtype): {"NATIVE_SYMMETRIC": "it is wrong"}}
            measurements.record_failures(kernel.kernels.speeds.machine.key_of(CPU), wrong)
        optimizer, _ = fsdp(kernel, SIZE)
        told = []
        optimizer.warmup(lambda *stage: told.append(stage[2]))
        return kernels(optimizer), measured, any("agreed on before" in what for what in told)


@pytest.mark.parametrize("failed", [False, True])
def test_what_one_rank_agreed_on_before_is_taken_unless_it_has_failed(fresh_pool, failed):
    """The rest takes it, and nobody measures."""
    reports = fresh_pool.run(agreed_before, failed)
    assert [measured for _, measured, _ in reports] == [[SIZE] if failed else [], [], [], []]
    assert [was_told for *_, was_told in reports] == [not failed] * 4
    assert {said[0].split("bfloat16, ")[1] for said, *_ in reports} == {f"measured by rank {0 if failed else 7}"}


def wrong_on_the_rank_that_measures(kernel):
    """Return the failures that this rank knows after a warm-up."""
    tune, wrong = kernel.tuning.tune, kernel.tuning.proof.WrongResultError("not symmetric")

    def prove():
        raise wrong

    with measuring(kernel, "NATIVE"):
        made = tune.contest_of

        def contest_of(task):
            contest = made(task)
            spoiled = contest.candidates["NATIVE"]._replace(prove=prove)
            return contest._replace(candidates={**contest.candidates, "NATIVE": spoiled})

        with mock.patch.object(tune, "contest_of", contest_of):
            optimizer, _ = fsdp(kernel, SIZE)
            optimizer.warmup(lambda *_: None)
        key = kernel.kernels.speeds.machine.key_of(CPU)
        return dict(kernel.kernels.speeds.measurements.failed(key, "cpu_products", "bfloat16")), kernels(optimizer)


def test_what_fails_on_the_rank_that_measures_is_left_out_on_all(fresh_pool):
    """Later choices must be alike, too."""
    results = fresh_pool.run(wrong_on_the_rank_that_measures)
    assert [failed for failed, _ in results] == [{"NATIVE": "not symmetric"}] * 4
    assert len({tuple(said) for _, said in results}) == 1


def test_what_can_be_measured_is_said_in_one_order(kernel):
    """All ranks must say the same, and sets have another order in each process."""
    sizes = [(24, 40), (8, 16), (16, 16), (32, 64), (8, 80), (48, 56)]
    named = [(f"layers.{i}.w", nn.Parameter(torch.ones(size))) for i, size in enumerate(sizes)]
    plan, to_measure = (
        plan_of(kernel.Muon(named, ns_dtype=torch.bfloat16)),
        kernel.step.agreement.rank_tuning.to_measure,
    )
    expected = sorted(f"cpu_products bfloat16 {m} x {k}" for m, k in sizes)
    assert to_measure(None, plan) == f"kernels that can be measured: {', '.join(expected)}"  # this process alone
    assert to_measure((0, 1), plan) == "kernels that can be measured: none"


def test_a_product_of_matrices_of_several_sizes_is_measured_with_the_most_that_need_it(kernel):
    """A GPU multiplies squares of m rows for every number of columns. Each device has its measurements."""
    half, tuning = torch.float16, kernel.step.agreement.rank_tuning
    needed = [("cuda:0", 2048, 2), ("cuda:0", 1024, 3), ("cuda:0", 4096, 1), ("cuda:1", 2048, 1)]
    matrices = [
        SimpleNamespace(measured_as=(torch.device(device), half, (512, n)))
        for device, n, count in needed
        for _ in range(count)
    ]
    measured = [(str(task.device), task.need.k, task.count) for task in tuning.tasks_of_matrices(matrices)]
    squares = [("cuda:0", 512, 3), ("cuda:1", 512, 1)]
    assert sorted(measured) == sorted([*needed, *squares])
    work = [k * count for _, k, count in measured]
    assert work == sorted(work, reverse=True)
