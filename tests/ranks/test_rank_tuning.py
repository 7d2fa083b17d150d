"""Ranks that share matrices take the same choice, whatever each of them would measure or has in its file."""

from __future__ import annotations

import contextlib
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.rank_measurements import CPU, SIZE, TABLES, fsdp, measuring
from tests.support.rank_pool import JobError
from tests.support.refusals import error_of


def kernels(optimizer) -> list[str]:
    return [row.kernel.replace("standard ", "") for row in optimizer.explain().rows]


def own_favourite(kernel):
    """Each rank would measure another winner."""
    waits, measure = [], kernel.tuning.tune.Tuner.measure

    def noted(self, task, waiting):
        waits.append(waiting)
        return measure(self, task, waiting)

    with (
        measuring(kernel, TABLES[dist.get_rank() % 3]) as measured,
        mock.patch.object(kernel.tuning.tune.Tuner, "measure", noted),
    ):
        optimizer, _ = fsdp(kernel, SIZE, (8, 16), (40, 24))
        told = []
        optimizer.warmup(lambda *stage: told.append(stage))
        return kernels(optimizer), list(zip(measured, waits)), [total for _, total, _ in told], told[-3][2]


def test_one_rank_measures_and_all_take_its_choice(fresh_pool):
    reports = fresh_pool.run(own_favourite)
    # Most work first; while it is measured, the other size waits for its share of the time.
    assert [measured for _, measured, _, _ in reports] == [[((24, 40), 1), ((8, 16), 0)], [], [], []]
    assert {tuple(said) for said, *_ in reports} == {("torch.mm bfloat16, measured by rank 0",) * 3}
    assert all(len(set(totals)) == 1 for _, _, totals, _ in reports)
    assert reports[0][3].endswith("SINGLE") and reports[3][3].endswith("SINGLE, by rank 0")


def one_has_begun(kernel, begun: int):
    """One rank has measured the larger size, but not with all candidates."""
    machine, file = kernel.kernels.speeds.machine, kernel.kernels.speeds.measurement_file
    with measuring(kernel, "NATIVE") as measured:
        if dist.get_rank() == begun:
            entry = {"m": SIZE[0], "k": SIZE[1], "products": "NATIVE", "untried": ["NATIVE_SYMMETRIC"]}
            table = file.Table({file.Need("cpu_products", "bfloat16", *SIZE): entry}, {})
            kernel.kernels.speeds.measurements.keep(machine.key_of(CPU), table)
        optimizer, _ = fsdp(kernel, SIZE, (8, 16))
        optimizer.warmup(lambda *_: None)
        return kernels(optimizer), measured


@pytest.mark.parametrize("begun", [0, 2])
def test_what_a_rank_has_begun_to_measure_comes_last(fresh_pool, begun):
    """As it does where a process is alone: other sizes have no choice of their own yet. Rank 0 measures for all."""
    reports = fresh_pool.run(one_has_begun, begun)
    assert [measured for _, measured in reports] == [[(8, 16), (24, 40)], [], [], []]
    assert len({tuple(said) for said, _ in reports}) == 1


def two_kinds(kernel, agreed: bool):
    """Two ranks with another processor each measure for themselves and their like, and once.

    The slow ones may have `agreed` before, as rank 2 knows.
    """
    rank = dist.get_rank()
    name = "a fast processor" if rank % 2 else "a slow processor"
    with (
        mock.patch.object(kernel.kernels.speeds.machine, "processor", lambda: name),
        measuring(kernel, TABLES[rank % 3]) as sizes,
    ):
        if agreed and rank == 2:
            need = kernel.kernels.speeds.measurement_file.Need("cpu_products", "bfloat16", *SIZE)
            entry = {"m": SIZE[0], "k": SIZE[1], "products": "SINGLE"}
            kernel.kernels.speeds.measurements.agree(kernel.kernels.speeds.machine.key_of(CPU), need, entry, 6, (2, 6))
        optimizer, _ = fsdp(kernel, SIZE)
        for _ in range(2):
            optimizer.warmup(lambda *_: None)
        return kernels(optimizer), sizes


@pytest.mark.parametrize("agreed", [False, True])
def test_each_kind_of_device_has_a_rank_that_measures(fresh_pool, agreed):
    """Unless some rank of the kind knows what its like have agreed on."""
    reports, slow = fresh_pool.run(two_kinds, agreed), "6" if agreed else "0"
    assert [measured for _, measured in reports] == [[] if agreed else [SIZE], [SIZE], [], []]
    assert [said[0].split()[-1] for said, _ in reports] == [slow, "1", slow, "1"]
    assert [said[0].split()[0] for said, _ in reports] == ["torch.mm", "gemm_", "torch.mm", "gemm_"]


def failing_measurement(kernel):
    with measuring(kernel, "SINGLE", problems=[ValueError("the device is gone")]):
        optimizer, _ = fsdp(kernel, SIZE)
        optimizer.warmup(lambda *_: None)


def test_a_measurement_that_fails_is_told_to_those_who_wait(fresh_pool):
    with pytest.raises(JobError, match=r"(?s)ranks \[0, 1, 2, 3\].*rank 0 could not measure.*the device is gone"):
        fresh_pool.run(failing_measurement)


def without_time(kernel):
    with measuring(kernel, "SINGLE") as measured:
        optimizer, _ = fsdp(kernel, SIZE)
        told = []
        optimizer.warmup(lambda *stage: told.append(stage[2]), budget=0)
        return kernels(optimizer), measured, sum("1 left to their default" in what for what in told)


def test_without_time_all_stay_as_they_were(fresh_pool):
    for said, measured, told in fresh_pool.run(without_time):
        assert "by default" in said[0] and not measured and told == 1


def plain_parameters(kernel):
    """Of which DDP may have copies that the optimizer does not know of; and the same ones, of which it is told."""
    with measuring(kernel, TABLES[dist.get_rank() % 3]) as measured:
        unknown = kernel.Muon([("w", nn.Parameter(torch.ones(SIZE)))], ns_dtype=torch.bfloat16)
        told = []
        with pytest.warns(UserWarning, match="proven or measured for w: other ranks may have copies.*process_group="):
            unknown.warmup(lambda *stage: told.append(stage[2]))
        assert any(line.startswith("nothing is proven or measured for w") for line in told)
        alone = list(measured), kernels(unknown)
        without_choice = kernel.Muon([("w", nn.Parameter(torch.ones(SIZE)))], ns_dtype=torch.float64)
        exchange = kernel.ExchangeOptions(process_group=dist.group.WORLD)
        known = kernel.Muon([("w", nn.Parameter(torch.ones(SIZE)))], ns_dtype=torch.bfloat16, exchange=exchange)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            known.warmup(lambda *_: None)
            without_choice.warmup(lambda *_: None)
        return *alone, kernels(known), kernels(unknown)


def test_unknown_copies_keep_their_default(fresh_pool):
    for measured, alone, known, after in fresh_pool.run(plain_parameters):
        assert not measured and "by default" in alone[0] and alone == after
        assert "measured by rank 0" in known[0]


def shards_beside_a_plain_matrix(kernel):
    """Return the warnings of a warm-up, its stages, and the kernels."""
    with measuring(kernel, "SINGLE"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, (shard,) = fsdp(kernel, SIZE)
        named = [("shard.weight", shard), ("plain.weight", nn.Parameter(torch.ones(8, 16)))]
        optimizer, stages = kernel.Muon(named, ns_dtype=torch.bfloat16), []
        optimizer.warmup(lambda *stage: stages.append(stage))
        return [str(warning.message) for warning in told], stages, kernels(optimizer)


def test_only_those_whose_copies_are_unknown_are_left_out(fresh_pool):
    for told, stages, (sharded, plain) in fresh_pool.run(shards_beside_a_plain_matrix):
        (text,) = (line for line in told if line.startswith("warmup: "))
        assert "measured for plain.weight: other ranks" in text
        assert [done for done, _, _ in stages] == list(range(1, len(stages) + 1))
        assert {total for _, total, _ in stages} == {len(stages)}
        assert "measured by rank 0" in sharded and "by default" in plain


def less_to_measure(kernel):
    """Nothing can be measured on rank 1, and then Triton fails there; return the errors of the warm-ups."""
    tuning, errors = kernel.step.agreement.rank_tuning, []
    with measuring(kernel, "NATIVE"):
        optimizer, _ = fsdp(kernel, SIZE)
        for name, other in {"tasks_of": lambda *_: [], "triton_fault": lambda _: "no C compiler"}.items():
            missing = mock.patch.object(tuning, name, other)
            with missing if dist.get_rank() == 1 else contextlib.nullcontext():
                errors.append(error_of(lambda: optimizer.warmup(lambda *_: None)))
        return errors


def test_ranks_that_cannot_measure_the_same_say_so_before_the_warm_up(fresh_pool):
    for missing, failing in fresh_pool.run(less_to_measure):
        assert "rank 0 has kernels that can be measured: cpu_products bfloat16 24 x 40, rank 1 has kernels" in missing
        assert failing.endswith("cpu_products bfloat16 24 x 40; Triton fails here, explain() says why")
