"""Symmetric products on CPUs from the blocks of the lower triangle."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.proofs import roundings
from tests.support.symmetric_products import ALPHA, BETA, normal, symmetric

CPU, FLOAT32 = torch.device("cpu"), torch.float32
BLOCK = 192
SIZES = [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 500]


@pytest.fixture
def triangle(kernel):
    return kernel.kernels.triangle


@pytest.fixture
def products(kernel, measurements):
    """The tables, where nothing was measured."""
    return kernel.kernels.products


@pytest.fixture
def poisoned():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_is(C, exact, allowed):
    assert torch.equal(C, C.mT)
    below = torch.ones_like(C, dtype=torch.bool).tril()
    assert ((C.double() - exact).abs() <= allowed)[below].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("m", SIZES)
def test_a_product_errs_by_its_roundings(triangle, poisoned, m, dtype):
    X, A = normal(1, m, 40, dtype=dtype)[0], symmetric(1, m, dtype)[0]
    assert_is(triangle.triangular_product(X, X.mT), *roundings.product(X, X.mT, 1.0))
    assert_is(triangle.triangular_product(A, A, A, ALPHA, BETA), *roundings.product(A, A, ALPHA, (BETA, A)))


def test_strides_and_operands_stay(triangle):
    X = normal(1, 300, 40)[0]
    wide, tall = X.clone(), X.mT.contiguous()
    C = triangle.triangular_product(wide, tall)
    assert_is(C, *roundings.product(X, X.mT, 1.0))
    assert_is(triangle.triangular_product(tall.mT, wide.mT), *roundings.product(X, X.mT, 1.0))
    assert torch.equal(wide, X) and torch.equal(tall.mT, X)


def test_a_nan_stays_in_its_row_and_column(triangle):
    X = normal(1, 300, 40)[0]
    clean = triangle.triangular_product(X, X.mT)
    X[200, 3] = torch.nan
    hit = torch.zeros(300, 300, dtype=torch.bool)
    hit[200, :] = hit[:, 200] = True
    C = triangle.triangular_product(X, X.mT)
    assert torch.equal(C.isnan(), hit) and torch.equal(C[~hit], clean[~hit])


def test_about_half_of_the_work_is_left(triangle):
    """Of b blocks of rows, b (b + 1) / 2 of b² blocks are multiplied."""
    X = normal(1, 5 * BLOCK, 40)[0]
    with FlopCounterMode(display=False) as counted:
        triangle.triangular_product(X, X.mT)
    assert counted.get_total_flops() == 15 / 25 * 2 * len(X) ** 2 * 40


def test_large_matrices_in_float32_take_it_by_default(products):
    def chosen(dtype, m):
        table = products.select_products(CPU, dtype, m, 2 * m)
        return table.name, table.source

    assert chosen(FLOAT32, 1023) == (products.SINGLE.name, "by default")
    assert chosen(FLOAT32, 1024) == (products.TRIANGLE.name, "by default")
    assert chosen(FLOAT32, 2 * BLOCK - 1) == (products.SINGLE.name, "")  # one block of rows: no choice
    assert chosen(torch.float64, 1024) == (products.SINGLE.name, "by default")
    assert chosen(torch.float16, 4096) == (products.SINGLE.name, "")


def test_gradients_flow_through_torchs_whole_products(kernel, products):
    circumstances = kernel.kernels.gains.Circumstances(True)
    assert products.select_products(CPU, FLOAT32, 1024, 1024, circumstances) is products.SINGLE


def test_an_iteration_errs_no_more_than_with_whole_products(kernel, products):
    """Both are as far from float64 as rounding takes them: at most twice as far as torch's whole products."""
    G = normal(2, 512, 640)
    exact = kernel.orthogonalize(G.double())
    errors = {}
    iteration = kernel.iteration.choose_iteration(
        CPU, FLOAT32, (512, 640), kernel.schedules.resolve_schedule("polar_express", 5), "standard"
    )
    for name in ("SINGLE", "TRIANGLE"):
        factors = kernel.polar.polar_factors(G, iteration._replace(products=getattr(products, name)), 1e-7)
        errors[name] = (factors.double() - exact).norm()
    assert errors["TRIANGLE"] <= 2 * errors["SINGLE"]


def test_it_runs_in_a_compiled_graph(kernel, products):
    G = normal(1, 1024, 1024)
    compiled = torch.compile(lambda X: kernel.orthogonalize(X, dtype=FLOAT32), fullgraph=True, backend="eager")
    assert torch.equal(compiled(G), kernel.orthogonalize(G, dtype=FLOAT32))


def test_it_runs_under_vmap(triangle):
    """There torch multiplies a batch, which may sum in another order."""
    X = normal(2, 300, 40)
    for C, x in zip(torch.vmap(lambda x: triangle.triangular_product(x, x.mT))(X), X):
        assert_is(C, *roundings.product(x, x.mT, 1.0))
