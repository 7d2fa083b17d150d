"""Contests of torch's products and the compiled ones on a CPU."""

from __future__ import annotations

import pytest
import torch

CPU, FLOAT32, BFLOAT16 = torch.device("cpu"), torch.float32, torch.bfloat16
NAMES = ("SINGLE", "NATIVE", "NATIVE_SYMMETRIC")


def products_of(work) -> str:
    """Return the name of the products of an iteration that is timed."""
    _, iteration, _ = work.args
    return iteration.products.name


def summaries_of(tune, clock, tasks) -> list[str]:
    return [stage() for stage in tune.stages_of(tune.Tuner(60.0, clock), tasks)]


@pytest.mark.parametrize("fastest", NAMES)
def test_the_faster_one_is_taken(kernel, measurements, table_clock, fastest):
    tune, products = kernel.tuning.tune, kernel.kernels.products
    tables = products.cpu_tables(FLOAT32)
    seconds = {tables[name].name: 0.5 if name == fastest else 1.0 for name in NAMES}
    todo = kernel.tuning.contest.tasks_of(CPU, FLOAT32, (400, 420), 1)
    summaries_of(tune, table_clock(seconds, name_of=products_of), todo)
    chosen = products.select_products(CPU, FLOAT32, 400, 420)
    assert (chosen.name, chosen.source) == (tables[fastest].name, "measured here")


@pytest.mark.parametrize("usual, method", [(FLOAT32, "gram"), (BFLOAT16, "standard")], ids=str)
def test_what_is_timed_in_float32_is_what_steps_run(kernel, measurements, monkeypatch, usual, method):
    """With every table: steps run the Gram iteration only where float32 is the default."""
    monkeypatch.setattr(kernel.tuning.contest, "CPU_WORK_DTYPE", usual)
    monkeypatch.setattr(kernel.iteration, "torch_is_slow", lambda _: True)
    (task,) = kernel.tuning.contest.tasks_of(CPU, FLOAT32, (64, 192), 1)
    contest = kernel.tuning.contest.cpu_contest(task)
    assert {each.run.args[1].method for each in contest.candidates.values()} == {method}


def test_what_steps_take_without_a_measurement_keeps_its_place_in_a_tie(kernel, measurements):
    """Of long bfloat16 matrices that may be the Gram iteration. Messages tell all candidates apart."""
    products, size = kernel.kernels.products, (256, 1024)
    (task,) = kernel.tuning.contest.tasks_of(CPU, BFLOAT16, size, 1)
    default = products.select_products(CPU, BFLOAT16, *size)
    contest = kernel.tuning.contest.cpu_contest(task)
    assert products.cpu_tables(BFLOAT16)[contest.before] == default._replace(source="")
    assert len({candidate.label for candidate in contest.candidates.values()}) == len(contest.candidates)


def test_torchs_products_are_timed_as_steps_run_them(kernel, measurements, monkeypatch):
    """Where torch may round float32 factors, steps keep the standard iteration with its products, and no others."""
    monkeypatch.setattr(kernel.tuning.contest, "CPU_WORK_DTYPE", FLOAT32)
    monkeypatch.setattr(kernel.iteration, "torch_is_slow", lambda _: False)
    (task,) = kernel.tuning.contest.tasks_of(CPU, FLOAT32, (64, 192), 1)
    candidates = kernel.tuning.contest.cpu_contest(task).candidates
    methods = {name: each.run.args[1].method for name, each in candidates.items()}
    assert methods == {"SINGLE": "standard", "NATIVE": "gram", "NATIVE_SYMMETRIC": "gram"}


def method_and_products_of(work) -> str:
    """Return what is said of an iteration that is timed."""
    _, iteration, _ = work.args
    return f"{iteration.method} {iteration.products.name}"


@pytest.mark.parametrize("fastest", [*NAMES, "NATIVE_GRAM"])
def test_in_bfloat16_the_gram_iteration_with_float32_squares_competes(kernel, measurements, table_clock, fastest):
    """What wins for a size is what `auto` runs there."""
    tune, tables = kernel.tuning.tune, kernel.kernels.products.cpu_tables(BFLOAT16)
    methods = {name: "gram_float32" if name == "NATIVE_GRAM" else "standard" for name in tables}
    seconds = {f"{methods[name]} {table.name}": 0.5 if name == fastest else 1.0 for name, table in tables.items()}
    todo = kernel.tuning.contest.tasks_of(CPU, BFLOAT16, (48, 80), 1)
    summaries_of(tune, table_clock(seconds, name_of=method_and_products_of), todo)
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    chosen = kernel.iteration.choose_iteration(CPU, BFLOAT16, (48, 80), schedule)
    assert (chosen.method, chosen.products) == (methods[fastest], tables[fastest]._replace(source="measured here"))


@pytest.mark.parametrize(
    "name, spoil",
    [
        ("gemm_", lambda multiply: lambda C, *rest: multiply(C, *rest) or C.dtype != FLOAT32 or C.mul_(1.001)),
        ("gram_newton_schulz_", lambda iterate: lambda X, *rest: iterate(X, *rest) or X[-1, 0, 0].add_(0.01)),
        ("gram_newton_schulz_", lambda iterate: lambda X, *rest: iterate(X, *rest) or (1 in rest[5] and X.mul_(2))),
        ("gram_newton_schulz_", lambda iterate: lambda X, *rest: iterate(X, *rest) or (max(rest[5]) > 2 and X.mul_(2))),
    ],
    ids=["squares", "all steps", "windows of one step", "windows with a step in the middle"],
)
def test_wrong_float32_squares_and_wrong_steps_fail_their_proof(kernel, monkeypatch, name, spoil):
    """An error of a thousandth is within bfloat16's rounding, but not within that of the float32 that it is kept in."""
    native = kernel.kernels.native_products
    (task,) = kernel.tuning.contest.tasks_of(CPU, BFLOAT16, (48, 80), 1)
    candidates = kernel.tuning.contest.cpu_contest(task).candidates
    candidates["NATIVE_GRAM"].prove()
    monkeypatch.setattr(native, name, spoil(getattr(native, name)))
    kernel.tuning.contest.cpu_contest(task).candidates["NATIVE"].prove()
    with pytest.raises(kernel.tuning.proof.WrongResultError):
        kernel.tuning.contest.cpu_contest(task).candidates["NATIVE_GRAM"].prove()


def test_steps_in_one_call_that_are_wrong_from_the_second_on_fail_their_proof(kernel, monkeypatch):
    native = kernel.kernels.native_products
    iterate = native.newton_schulz_
    (task,) = kernel.tuning.contest.tasks_of(CPU, BFLOAT16, (48, 80), 1)
    spoiled = lambda X, A, B, steps, *rest: iterate(X, A, B, steps, *rest) or (len(steps) > 3 and X.mul_(2))  # noqa: E731
    monkeypatch.setattr(native, "newton_schulz_", spoiled)
    with pytest.raises(kernel.tuning.proof.WrongResultError, match="other bits in one call"):
        kernel.tuning.contest.cpu_contest(task).candidates["NATIVE"].prove()


@pytest.mark.parametrize("factors", [BFLOAT16, FLOAT32], ids=["gram matrix", "squares"])
def test_float32_products_of_bfloat16_matrices_are_proven_by_themselves(kernel, monkeypatch, factors):
    """The iteration in one call may have the same error: then it has the bits of one step after the other."""
    native, contest = kernel.kernels.native_products, kernel.tuning.contest
    multiply = native.gemm_

    def spoiled(C, A, *rest):
        return multiply(C, A, *rest) or (C.dtype, A.dtype) != (FLOAT32, factors) or C.mul_(1.001)

    (task,) = contest.tasks_of(CPU, BFLOAT16, (48, 80), 1)
    monkeypatch.setattr(contest, "prove_iteration", lambda *_: None)
    contest.cpu_contest(task).candidates["NATIVE_GRAM"].prove()
    monkeypatch.setattr(native, "gemm_", spoiled)
    with pytest.raises(kernel.tuning.proof.WrongResultError, match="times what rounding can explain"):
        contest.cpu_contest(task).candidates["NATIVE_GRAM"].prove()


@pytest.mark.parametrize("wrong", ["gram", "gram_affine", "commuting"])
def test_each_product_of_a_table_is_proven(kernel, wrong):
    """They may be one function, as they are on a CPU, or three."""
    contest, native, like = kernel.tuning.contest, kernel.kernels.products.NATIVE, torch.empty(0, dtype=FLOAT32)
    products = {name: getattr(native, name) for name in ("gram", "gram_affine", "commuting")}
    contest._prove_squares(like, (48, 80), native.batched, *products.values())
    right = products[wrong]
    products[wrong] = lambda *operands: 2 * right(*operands)
    with pytest.raises(kernel.tuning.proof.WrongResultError, match="times what rounding can explain"):
        contest._prove_squares(like, (48, 80), native.batched, *products.values())


def test_a_wrong_product_is_not_taken(kernel, measurements, table_clock, monkeypatch):
    """Every table but torch's products is proven before it is timed."""
    tune, products, native = kernel.tuning.tune, kernel.kernels.products, kernel.kernels.native_products
    (task,) = kernel.tuning.contest.tasks_of(CPU, FLOAT32, (96, 128), 1)
    kernel.tuning.contest.cpu_contest(task).candidates["NATIVE"].prove()
    multiply = native.gemm_
    monkeypatch.setattr(native, "gemm_", lambda C, *rest: multiply(C, *rest) or C.tril_())
    seconds = {table.name: 1.0 for table in products.cpu_tables(FLOAT32).values()}
    clock = table_clock(seconds, name_of=products_of)
    assert "NATIVE failed its proof: not symmetric" in "".join(summaries_of(tune, clock, [task]))
    assert products.select_products(CPU, FLOAT32, 1024, 1024).name == products.SINGLE.name


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_wrong_product_that_is_not_symmetric_fails_where_it_is_the_compiled_one(kernel, monkeypatch, dtype):
    native = kernel.kernels.native_products
    multiply = native.gemm_

    def spoiled(C, *arguments):
        multiply(C, *arguments)
        *_, is_symmetric = arguments[:6]  # behind A, B, D, alpha and beta
        return None if is_symmetric else C.mul_(1.1)

    (task,) = kernel.tuning.contest.tasks_of(CPU, dtype, (48, 80), 1)
    candidates = kernel.tuning.contest.cpu_contest(task).candidates
    monkeypatch.setattr(native, "gemm_", spoiled)
    candidates["NATIVE_SYMMETRIC"].prove()
    with pytest.raises(kernel.tuning.proof.WrongResultError, match="times what rounding can explain"):
        candidates["NATIVE"].prove()


def test_as_many_matrices_are_timed_as_a_step_works_on_at_once(kernel, measurements, monkeypatch):
    """With the iteration that it has today."""
    contest, asked = kernel.tuning.contest, []
    monkeypatch.setattr(contest, "matrices_together", lambda *arguments: asked.append(arguments) or 3)
    for count, timed in ((0, 1), (2, 2), (5, 3)):
        (task,) = contest.tasks_of(CPU, FLOAT32, (48, 80), count)
        contests = contest.cpu_contest(task)
        assert contests.entry("SINGLE", {})["count"] == timed
        assert asked.pop() == (CPU, (48, 80), contests.candidates[contests.before].run.args[1])
        drawn = [candidate.run.args[0] for candidate in contests.candidates.values()]
        assert all(len(G) == timed and G.std() == pytest.approx(1.0, abs=0.1) for G in drawn)


def test_an_entry_has_the_times_of_all_tables(kernel, measurements):
    """The one that torch's products have is what others are compared with."""
    contest, timed = kernel.tuning.contest, kernel.tuning.race.Timed
    (task,) = contest.tasks_of(CPU, FLOAT32, (48, 80), 1)
    made = contest.cpu_contest(task)
    times = {name: timed(float(number), 0.1) for number, name in enumerate(made.candidates, 1)}
    entry = made.entry("NATIVE_SYMMETRIC", times)
    assert entry == {"m": 48, "k": 80, "products": "NATIVE_SYMMETRIC", "count": 1, "seconds": entry["seconds"]}
    assert entry["seconds"] == {"SINGLE": 1.0, "NATIVE": 2.0, "NATIVE_SYMMETRIC": 3.0} and made.rival == "SINGLE"


@pytest.mark.parametrize(
    "dtype, squares", [(FLOAT32, [(48, 80, FLOAT32)]), (BFLOAT16, [(48, 80, BFLOAT16), (48, 48, FLOAT32)])], ids=str
)
def test_tables_prove_what_they_share_once(kernel, measurements, monkeypatch, dtype, squares):
    """In each size and dtype that is multiplied: of bfloat16 matrices a Gram matrix may be kept in float32.

    What torch multiplies is not proven, and nobody is left out for it.
    """
    contest, proven, applied = kernel.tuning.contest, [], []
    note = lambda X: proven.append((*X.shape[1:], X.dtype))  # noqa: E731
    prove = contest.prove_products
    monkeypatch.setattr(contest, "prove_products", lambda *arguments: note(arguments[1].X) or prove(*arguments))
    monkeypatch.setattr(contest, "prove_apply", lambda affine, *_: applied.append(affine))
    for repeats, size in enumerate([(48, 80), (32, 40)], 1):
        (task,) = contest.tasks_of(CPU, dtype, size, 1)
        for candidate in contest.cpu_contest(task).candidates.values():
            candidate.prove()
        assert proven[: len(squares)] == squares and len(proven) == repeats * len(squares)
        assert applied == [kernel.kernels.products.NATIVE.affine] * repeats


def test_an_iteration_is_proven_on_as_many_matrices_as_its_threads_take(kernel, monkeypatch):
    """More than threads where each takes a whole one; one where all share it, because a step takes those one by one.

    In float32 both iterations are proven: users may ask for either.
    """
    contest, proven = kernel.tuning.contest, []
    for name in ("prove_products", "prove_apply"):
        monkeypatch.setattr(contest, name, lambda *_: None)
    monkeypatch.setattr(contest, "prove_iteration", lambda *arguments: proven.append(tuple(arguments[3])))
    for size in (48, 80), (600, 1200):  # of which a core holds one in half precision
        (task,) = contest.tasks_of(CPU, FLOAT32, size, 1)
        contest.cpu_contest(task).candidates["NATIVE"].prove()
    assert proven == [(torch.get_num_threads() + 1, 48, 80)] * 2 + [(1, 600, 1200)] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_nothing_is_measured_where_there_is_no_choice(kernel, dtype):
    assert kernel.tuning.contest.tasks_of(CPU, dtype, (512, 1024), 1) == []
