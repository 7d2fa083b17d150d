"""Where bfloat16 matrices on a CPU take the Gram iteration with float32 squares."""

from __future__ import annotations

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def choose(kernel):
    five = kernel.schedules.resolve_schedule("polar_express", 5)

    def chosen(dtype, m, n, method="auto", schedule=five):
        return kernel.iteration.choose_iteration(CPU, dtype, (m, n), schedule, method)

    return chosen


def test_auto_takes_float32_squares_of_bfloat16_where_the_products_prefer_them(kernel, choose, monkeypatch):
    """The products know which size they are for. What a user asks for by name stays."""
    tables = kernel.kernels.products.cpu_tables(torch.bfloat16)
    monkeypatch.setitem(kernel.kernels.native_products.INSTRUCTIONS, torch.bfloat16, "avx512_bf16")
    of = lambda name: tables[name]._replace(source="by default")  # noqa: E731
    for m, n, expected in (64, 640, "gram_float32"), (64, 128, "standard"):
        iteration = choose(torch.bfloat16, m, n)
        assert (iteration.method, iteration.work_dtype) == (expected, torch.bfloat16)
        assert iteration.products == of("NATIVE_GRAM" if expected == "gram_float32" else "NATIVE")
        assert choose(torch.bfloat16, m, n, "standard").products == of("NATIVE")
        by_name = choose(torch.bfloat16, m, n, "gram_float32")
        assert (by_name.products, by_name.chain_dtype) == (of("NATIVE_GRAM"), torch.float32)
    four = kernel.schedules.resolve_schedule("polar_express", 4)
    assert choose(torch.bfloat16, 64, 640, schedule=four).method == "gram_float32"
    unsafe = kernel.schedules.resolve_schedule([(8.2, -22.5, 15.9)], 5)
    three = kernel.schedules.resolve_schedule("polar_express", 3)
    for schedule in unsafe, three:
        iteration = choose(torch.bfloat16, 64, 640, schedule=schedule)
        assert (iteration.method, iteration.products) == ("standard", of("NATIVE"))


@pytest.mark.parametrize("instructions, expected", [("avx512_bf16", True), ("amx", False), ("portable", False)])
def test_float32_squares_are_the_default_where_bfloat16_is_twice_as_fast(kernel, monkeypatch, instructions, expected):
    """Five steps: 15 n + 5 m of bfloat16 against 6 n, and 14 m of float32 that count twice: n from about 2.75 m on.

    Sides are padded to blocks of 32, and 64 columns pay for the products that there are more.
    """
    products = kernel.kernels.products
    monkeypatch.setitem(kernel.kernels.native_products.INSTRUCTIONS, torch.bfloat16, instructions)
    monkeypatch.setattr(products, "failed_here", lambda *_: ())
    takes = lambda m, n: products.select_products(CPU, torch.bfloat16, m, n).float32_squares  # noqa: E731
    for m, padded in (1, 32), (32, 32), (33, 64), (64, 64), (1000, 1024):
        least = int(2.75 * padded) + 64
        assert not takes(m, m) and not takes(m, least - 1)
        assert takes(m, least) == expected


def test_ranks_sum_gram_matrices_of_bfloat16_in_float32_alone(kernel):
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    case = CPU, torch.bfloat16, (64, 640), schedule
    iteration = kernel.iteration.summed_iteration(*case, "gram_float32")
    assert (iteration.method, iteration.work_dtype, iteration.chain_dtype) == (
        "gram_float32",
        torch.bfloat16,
        torch.float32,
    )
    assert kernel.iteration.summed_iteration(*case, "gram") is None


@pytest.mark.parametrize("method", ["auto", "gram_float32"])
def test_products_that_have_failed_their_proof_give_way_to_the_next(kernel, monkeypatch, method):
    products = kernel.kernels.products
    monkeypatch.setitem(kernel.kernels.native_products.INSTRUCTIONS, torch.bfloat16, "avx512_bf16")
    both = "NATIVE_GRAM", "NATIVE"
    for failed, expected in ((), "NATIVE_GRAM"), (both[:1], "NATIVE"), (both, "SINGLE"), (both[1:], "NATIVE_GRAM"):
        monkeypatch.setattr(products, "failed_here", lambda *_, failed=failed: failed)
        table = products.select_products(CPU, torch.bfloat16, 64, 640, method=method)
        assert table == products.cpu_tables(torch.bfloat16)[expected]._replace(source="by default")


def test_what_has_failed_is_not_run_by_asking_for_a_method(kernel, choose, monkeypatch):
    """A table for the one iteration has no part of the other, so neither brings what has failed along."""
    monkeypatch.setitem(kernel.kernels.native_products.INSTRUCTIONS, torch.bfloat16, "avx512_bf16")
    monkeypatch.setattr(kernel.kernels.products, "failed_here", lambda *_: ("NATIVE_GRAM",))
    by_name = choose(torch.bfloat16, 64, 640, "gram_float32")
    assert by_name.products.gram_newton_schulz is None and not by_name.products.float32_squares
    monkeypatch.setattr(kernel.kernels.products, "failed_here", lambda *_: ("NATIVE",))
    for schedule in None, kernel.schedules.resolve_schedule("polar_express", 3):
        options = {} if schedule is None else {"schedule": schedule}
        iteration = choose(torch.bfloat16, 64, 640, "auto" if options else "standard", **options)
        assert (iteration.method, iteration.products.name) == ("standard", "torch.mm")
