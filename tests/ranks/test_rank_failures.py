"""A product that has failed its proof on one rank is no silent difference between ranks, and is healed by warm-up."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.rank_measurements import CPU, SIZE, fsdp, measuring


def failed_on_one_rank(kernel, dtype: torch.dtype, warm: bool = False):
    """A product has failed on the last rank alone, in `dtype`; return what the first step, after warm-up, raises."""
    with measuring(kernel, "NATIVE"):
        key, store = kernel.kernels.speeds.machine.key_of(CPU), kernel.kernels.speeds.measurements
        if dist.get_rank() == 3:
            wrong = {("cpu_products", str(dtype).replace("torch.", "")): {"NATIVE": "wrong"}}
            store.keep(key, kernel.kernels.speeds.measurement_file.Table({}, wrong))
        optimizer, params = fsdp(kernel, SIZE)
        if warm:
            optimizer.warmup(lambda *stage: None)
        for p in params:
            p.grad = p.detach().clone()
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
        return None


def test_a_failure_on_one_rank_is_no_silent_difference(fresh_pool):
    for said in fresh_pool.run(failed_on_one_rank, torch.bfloat16):
        assert "failed here: cpu_products bfloat16 NATIVE" in said and "failed here: nothing" in said


def test_failures_are_those_of_the_kernels_and_dtypes_that_matrices_may_take(kernel, monkeypatch):
    """On a GPU: of the float32 chain of bfloat16 matrices, and of no kernel that takes no matrix of this size."""
    plan, ranks, gpu = kernel.plan.plan, (0, 1), torch.device("cuda", 0)
    monkeypatch.setattr(plan, "key_of", lambda device: "a GPU")
    monkeypatch.setattr(plan, "failed", lambda key, *of: {"wrong": ""} if of == ("symmetric_gemm", "float32") else {})

    def line(rows: int, cols: int, sharers, chain_dtype: torch.dtype) -> dict:
        parameter, iteration = SimpleNamespace(sharers=sharers, device=gpu), SimpleNamespace(chain_dtype=chain_dtype)
        return plan.failures([kernel.plan.matrix.Matrix(parameter, 0, rows, cols, 1.0, iteration, None, 0)])

    assert line(4096, 256, ranks, torch.float32) == {ranks: "failed here: symmetric_gemm float32 wrong"}
    assert line(4096, 256, ranks, torch.bfloat16) == line(4000, 1001, ranks, torch.float32)
    assert line(4096, 256, ranks, torch.bfloat16) == {ranks: "failed here: nothing"}
    assert line(4096, 256, None, torch.float32) == {}


def test_a_failure_in_another_dtype_stops_nobody(fresh_pool):
    assert fresh_pool.run(failed_on_one_rank, torch.float16) == [None] * 4


def test_warm_up_tells_all_ranks_what_has_failed_on_one(fresh_pool):
    assert fresh_pool.run(failed_on_one_rank, torch.bfloat16, True) == [None] * 4


def measured_failure(kernel):
    """A product fails its proof on the rank that measures; return what the next run of the job knows of it."""
    with measuring(kernel, "NATIVE"):
        prove = kernel.tuning.tune.contest_of

        def contest_of(task):
            contest = prove(task)
            wrong = contest.candidates["NATIVE"]._replace(prove=fail)
            return contest._replace(candidates={**contest.candidates, "NATIVE": wrong})

        def fail() -> None:
            raise kernel.tuning.proof.WrongResultError("wrong")

        with mock.patch.object(kernel.tuning.tune, "contest_of", contest_of):
            fsdp(kernel, SIZE)[0].warmup(lambda *stage: None)
        kernel.kernels.speeds.measurements.forget()
        optimizer, params = fsdp(kernel, SIZE)
        for p in params:
            p.grad = p.detach().clone()
        optimizer.step()
        return dict(
            kernel.kernels.speeds.measurements.failed(
                kernel.kernels.speeds.machine.key_of(CPU), "cpu_products", "bfloat16"
            )
        )


def test_what_failed_is_kept_by_all_ranks_for_the_next_run(fresh_pool):
    assert fresh_pool.run(measured_failure) == [{"NATIVE": "wrong"}] * 4
