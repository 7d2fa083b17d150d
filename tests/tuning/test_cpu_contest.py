"""Contests of torch's products and the compiled ones, in float32 on a CPU."""

from __future__ import annotations

import pytest
import torch

CPU, FLOAT32 = torch.device("cpu"), torch.float32
NAMES = ("SINGLE", "NATIVE", "NATIVE_SYMMETRIC")


def products_of(work) -> str:
    """Return the name of the products of an iteration that is timed."""
    _, iteration, _ = work.args
    return iteration.products.name


def said_of(tune, clock, tasks) -> list[str]:
    return [stage() for stage in tune.stages_of(tune.Tuner(60.0, clock), tasks)]


@pytest.mark.parametrize("fastest", NAMES)
def test_the_faster_one_is_taken(kernel, measurements, table_clock, fastest):
    tune, products = kernel.tuning.tune, kernel.kernels.products
    tables = products.cpu_tables(FLOAT32)
    seconds = {tables[name].name: 0.5 if name == fastest else 1.0 for name in NAMES}
    todo = kernel.tuning.contest.tasks_of(CPU, FLOAT32, (400, 420), 1)
    said_of(tune, table_clock(seconds, name_of=products_of), todo)
    chosen = products.select_products(CPU, FLOAT32, 400, 420)
    assert (chosen.name, chosen.source) == (tables[fastest].name, "measured here")


def test_a_wrong_product_is_not_taken(kernel, measurements, table_clock, monkeypatch):
    """Every table but torch's products is proven before it is timed."""
    tune, products, native = kernel.tuning.tune, kernel.kernels.products, kernel.kernels.native_products
    (task,) = kernel.tuning.contest.tasks_of(CPU, FLOAT32, (96, 128), 1)
    kernel.tuning.contest.cpu_contest(task).candidates["NATIVE"].prove()
    multiply = native.gemm_
    monkeypatch.setattr(native, "gemm_", lambda C, *rest: multiply(C, *rest) or C.tril_())
    seconds = {table.name: 1.0 for table in products.cpu_tables(FLOAT32).values()}
    clock = table_clock(seconds, name_of=products_of)
    assert "NATIVE failed its proof: not symmetric" in "".join(said_of(tune, clock, [task]))
    assert products.select_products(CPU, FLOAT32, 1024, 1024).name == products.SINGLE.name


def test_tables_prove_what_they_share_once(kernel, measurements, monkeypatch):
    """Both tables of the compiled products multiply squares by the same functions."""
    contest, proven = kernel.tuning.contest, []
    prove = contest.prove_products
    monkeypatch.setattr(contest, "prove_products", lambda *given: proven.append(given[2]) or prove(*given))
    for size in ((48, 80), (32, 40)):
        (task,) = contest.tasks_of(CPU, FLOAT32, size, 1)
        for candidate in contest.cpu_contest(task).candidates.values():
            candidate.prove()
    assert proven == [(48, 80), (32, 40)]


def test_an_iteration_is_proven_on_as_many_matrices_as_its_threads_take(kernel, monkeypatch):
    """More than threads where each takes a whole one; one where all share it, because a step takes those one by one."""
    contest, proven = kernel.tuning.contest, []
    for name in ("prove_products", "prove_apply"):
        monkeypatch.setattr(contest, name, lambda *_: None)
    monkeypatch.setattr(contest, "prove_iteration", lambda *given: proven.append(tuple(given[3])))
    for size in ((48, 80), (1024, 4096)):
        (task,) = contest.tasks_of(CPU, FLOAT32, size, 1)
        contest.cpu_contest(task).candidates["NATIVE"].prove()
    assert proven == [(torch.get_num_threads() + 1, 48, 80), (1, 1024, 4096)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_nothing_is_measured_where_there_is_no_choice(kernel, dtype):
    assert kernel.tuning.contest.tasks_of(CPU, dtype, (512, 1024), 1) == []
