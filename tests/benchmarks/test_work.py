"""The formulas of an iteration's work are what torch counts, and the ideal is no more than what runs."""

from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import work


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def counted_with_symmetry(run, products) -> float:
    """Count half of each product but the last, B X, whose result alone is not symmetric."""
    symmetric = counted(lambda: run(products._replace(affine=lambda B, X, a, out=None: torch.empty_like(X))))
    return counted(lambda: run(products)) - symmetric / 2


@pytest.mark.parametrize("m, n", [(8, 8), (8, 24), (16, 40)])
def test_flop_formulas_match_torchs_counter(kernel, m, n):
    X, products = torch.randn(m, n, generator=torch.Generator().manual_seed(0)), kernel.kernels.products.SINGLE
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    standard = lambda products: kernel.kernels.newton_schulz.newton_schulz(X, schedule, products)  # noqa: E731
    assert counted(lambda: standard(products)) == work.dense_flop(m, n, 5)
    assert counted_with_symmetry(standard, products) == work.standard_flop(m, n, 5)
    windows = schedule[:2], schedule[2:]
    gram = lambda products: kernel.kernels.newton_schulz.gram_newton_schulz(X, windows, products, X.dtype)  # noqa: E731
    assert counted_with_symmetry(gram, products) == work.gram_flop(m, n, 5, 2)


def test_iteration_flop_follows_its_method(kernel):
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    choose = kernel.iteration.choose_iteration
    iterations = [
        choose(torch.device("cpu"), torch.float32, (8, 24), schedule, method) for method in ("standard", "gram")
    ]
    flop = [work.method_flop(iteration, 8, 24) for iteration in iterations]
    assert flop == [work.standard_flop(8, 24, 5), work.gram_flop(8, 24, 5, len(iterations[1].windows))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_ideal_is_the_cheapest_safe_method(kernel, dtype):
    """Of a long matrix the Gram iteration costs less. In bfloat16 it needs float32 squares, which few products have."""
    schedule, cpu = kernel.schedules.resolve_schedule("polar_express", 5), torch.device("cpu")
    carried = kernel.iteration.choose_iteration(cpu, torch.bfloat16, (64, 512), schedule, "gram_float32")
    gram = dtype == torch.float16 or carried.products.float32_squares
    for m, n in ((64, 64), (64, 512)):
        least = work.least_flop(kernel, cpu, dtype, (m, n), schedule)
        standard = work.standard_flop(m, n, 5)
        assert least == (min(standard, work.gram_flop(m, n, 5, 2)) if gram else standard)
    assert least < standard or not gram


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_no_iteration_that_runs_by_default_costs_less_than_the_ideal(kernel, dtype):
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    by_default = kernel.kernels.circumstances.Circumstances(default_dtype=True)
    for device, size in product((torch.device("cpu"), torch.device("cuda", 0)), ((64, 64), (64, 512), (96, 4096))):
        runs = kernel.iteration.choose_iteration(device, dtype, size, schedule, circumstances=by_default)
        assert work.least_flop(kernel, device, dtype, size, schedule) <= work.method_flop(runs, *size), (device, size)
