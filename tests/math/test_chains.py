"""One chain of m x m products for matrices of several lengths: the bits that each length has alone, on a CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.allocations import Allocations

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
EPS = 1e-7
# Batches with one short side; the second and third are tall.
SHAPES = [(3, 24, 40), (2, 40, 24), (4, 96, 24), (1, 24, 24)]


def drawn(shape, seed: int = 0):
    return by_long_side(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def by_long_side(matrices):
    """The same matrices, with runs of memory along the longer side: products on a CPU need that."""
    return matrices.mT.contiguous().mT if matrices.size(-2) > matrices.size(-1) else matrices


def not_in_place(products):
    """Products that fail where the result is to replace an operand, which those of a GPU would still read."""

    def affine(B, X, a, out=None):
        assert out is None or not torch._C._is_alias_of(out, X)
        return products.affine(B, X, a, out)

    return products._replace(affine=affine, in_place=False)


@pytest.fixture
def iteration(kernel):
    """The Gram iteration with products whose bits do not depend on the batch."""

    def of(steps: int, products=None):
        schedule = kernel.schedules.resolve_schedule("polar_express", steps)
        chosen = kernel.iteration.choose_iteration(CPU, torch.float32, (24, 96), schedule, "gram")
        windows = tuple((step,) for step in schedule) if steps == 1 else (schedule[:2], schedule[2:])
        return chosen._replace(windows=windows, products=products or not_in_place(kernel.kernels.products.NATIVE))

    return of


@pytest.mark.parametrize("together", [1, 3, 10])
@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("written", [False, True])
def test_a_matrix_gets_the_bits_that_it_has_alone(kernel, monkeypatch, iteration, together, steps, written):
    """However many are worked on at once; in one window and in two, of one step and of several."""
    monkeypatch.setattr(kernel.polar.chains, "matrices_together", lambda *_: together)
    chain, chosen = kernel.polar.chains, iteration(steps)
    batches = [drawn(shape, seed) for seed, shape in enumerate(SHAPES)]
    before = [G.clone() for G in batches]
    outs = [torch.full_like(G, torch.nan) if written else None for G in batches]
    norms = [torch.linalg.vector_norm(G.double(), dim=(1, 2)) if written else None for G in batches]
    stacks = chain.chained_polar_factors(
        [chain.Operand(G, chosen, EPS, out, norm) for G, out, norm in zip(batches, outs, norms)]
    )
    for G, old, factors, out in zip(batches, before, stacks, outs):
        alone = [kernel.polar.factors.polar_factors(g[None], chosen, EPS)[0] for g in G]
        assert torch.equal(factors, torch.stack(alone)) and torch.equal(G, old)
        assert out is None or torch.equal(out, factors)


def test_products_with_the_long_side_are_those_of_each_shape(kernel, iteration):
    """Tables may differ there: a shape may have been measured, another not."""
    products = kernel.kernels.products
    half = products.NATIVE._replace(affine=lambda *operands: products.NATIVE.affine(*operands).mul_(0.5))
    quarter = products.NATIVE._replace(gram=lambda X, out=None: products.NATIVE.gram(X, out).mul_(0.25))
    others = [products.NATIVE, half, quarter]
    chosen = [iteration(5, table) for table in others]
    operands = [kernel.polar.chains.Operand(drawn((2, 24, 60)), each, EPS) for each in chosen]
    together = kernel.polar.chains.chained_polar_factors(operands)
    for operand, factors in zip(operands, together):
        assert torch.equal(factors, *kernel.polar.chains.chained_polar_factors([operand]))
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(together, 2))


def test_gradients_go_through_a_chain(kernel, monkeypatch, iteration):
    """Those of the steps one after the other, in float64: the same operations, so up to their order.

    However few matrices are worked on together: autograd supports no product that writes to a part of a tensor.
    """
    monkeypatch.setattr(kernel.polar.chains, "matrices_together", lambda *_: 1)
    chosen = iteration(5, kernel.kernels.products.BATCHED)._replace(work_dtype=torch.float64, chain_dtype=torch.float64)
    G, weights = drawn((3, 24, 40)).double().requires_grad_(), drawn((3, 24, 40), 1).double()
    gradients = []
    for factors in (
        kernel.polar.chains.chained_polar_factors([kernel.polar.chains.Operand(G, chosen, EPS)])[0],
        kernel.polar.factors.polar_factors(G, chosen, EPS),
    ):
        gradients += torch.autograd.grad((factors * weights).sum(), G)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(2, 24, 96), (2, 96, 24)], ids=str)
def test_a_chain_compiles_into_one_graph(kernel, iteration, shape):
    chosen = iteration(5, kernel.kernels.products.BATCHED)
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def factors(G):
        return kernel.polar.chains.chained_polar_factors([kernel.polar.chains.Operand(G, chosen, EPS)])[0]

    compiled = torch.compile(factors, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(G), factors(G), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("written", [False, True])
def test_a_large_stack_is_worked_on_in_batches(kernel, monkeypatch, iteration, written):
    """`orthogonalize` takes any number of matrices, but works on no more at once than a step packs."""
    factors, chains = kernel.polar.factors, kernel.polar.chains
    chained, counts = chains.chained_polar_factors, []

    def counted(operands):
        counts.append([len(one.G) for one in operands])
        return chained(operands)

    monkeypatch.setattr(factors, "chained_polar_factors", counted)
    monkeypatch.setattr(factors, "packed_together", lambda *_: 3)
    monkeypatch.setattr(factors, "chain_key", lambda *_: "shared")
    G, chosen = drawn((7, 24, 40)), iteration(5)
    out, norms = (torch.empty_like(G), torch.linalg.vector_norm(G.double(), dim=(1, 2))) if written else (None, None)
    U = factors.polar_factors(G, chosen, EPS, out, norms)
    assert counts == [[2], [2], [3]]
    assert torch.equal(U, *chained([chains.Operand(G, chosen, EPS)]))
    assert out is None or torch.equal(out, U)


@pytest.mark.parametrize("key, together", [("shared", 7), (None, 7), (None, 3)])
def test_norms_that_are_known_are_taken_in_every_batch(kernel, monkeypatch, iteration, key, together):
    """They save a pass over each matrix. Twice the norm is as if the matrix were half as long, by a power of two."""
    factors = kernel.polar.factors
    monkeypatch.setattr(factors, "packed_together", lambda *_: 3)
    monkeypatch.setattr(factors, "matrices_together", lambda *_: together)
    monkeypatch.setattr(factors, "chain_key", lambda *_: key)
    G, chosen = drawn((7, 24, 40)), iteration(5)
    norms = torch.linalg.vector_norm(G.double(), dim=(1, 2))
    once = factors.polar_factors(G, chosen, EPS, norms=norms)
    twice = factors.polar_factors(G, chosen, EPS, norms=2 * norms)
    assert torch.equal(factors.polar_factors(2 * G, chosen, EPS, norms=2 * norms), once)
    assert all(not torch.equal(a, b) for a, b in zip(once, twice))


def test_a_batch_of_a_large_stack_has_as_many_bytes_as_a_step_packs(kernel, monkeypatch, iteration):
    factors, asked = kernel.polar.factors, []
    monkeypatch.setattr(factors, "packed_together", lambda *size: asked.append(size) or 1)
    monkeypatch.setattr(factors, "chain_key", lambda *_: "shared")
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
        factors.polar_factors(drawn((2, 24, 40)).to(dtype), iteration(5), EPS)
        assert asked.pop() == ((24, 40), itemsize)


def test_what_shares_a_chain(kernel):
    """The Gram iterations of a GPU whose m x m products are the same, if they take several matrices; none on a CPU."""
    products, chain_key = kernel.kernels.products, kernel.polar.chains.chain_key

    def of(n: int, method: str, table, device=GPU, dtype=torch.float16, steps: int = 5, **others):
        schedule = kernel.schedules.resolve_schedule("polar_express", steps)
        chosen = kernel.iteration.choose_iteration(CPU, dtype, (24, n), schedule, method)
        return chain_key(device, chosen._replace(products=table, **others))

    batched = products.BATCHED._replace(square_name="torch.bmm")
    assert of(48, "gram", batched) == of(96, "gram", batched._replace(gram=torch.matmul, gram_gain=1.4)) is not None
    assert of(48, "gram", batched) != of(48, "gram_float32", batched)
    assert of(48, "gram", batched) != of(48, "gram", batched._replace(square_name="symmetric_gemm"))
    assert of(48, "gram", batched) != of(48, "gram", batched, steps=4)
    assert of(48, "gram", batched, dtype=torch.float32) != of(48, "gram", batched, dtype=torch.float64)
    assert of(48, "standard", batched) is of(48, "gram", batched, CPU) is of(48, "gram", products.SINGLE) is None
    assert of(48, "gram", batched, in_one_launch=True) is None


@pytest.mark.parametrize("together", [1, 2, 6])
@pytest.mark.parametrize("method", ["gram", "gram_float32"])
@pytest.mark.parametrize("longer", [(1, 1), (2, 4)])  # squares take the most memory, or the long matrices do
def test_peak_memory_follows_a_formula(kernel, monkeypatch, longer, method, together):
    """A copy of all matrices, their factors, two squares of each, and five of each that is worked on at once."""
    monkeypatch.setattr(kernel.polar.chains, "matrices_together", lambda *_: together)
    schedule, m = kernel.schedules.resolve_schedule("polar_express", 5), 64
    chosen = kernel.iteration.choose_iteration(CPU, torch.float16, (m, 4 * m), schedule, method)
    chosen = chosen._replace(products=kernel.kernels.products.BATCHED)
    batches = [drawn((2, m, longer[0] * m)), drawn((4, longer[1] * m, m))]
    elements, count, square = sum(G.numel() for G in batches), 6, m * m * chosen.chain_dtype.itemsize
    rounded = 0 if method == "gram" else m * m * 2
    # `gram_float32` makes a float32 copy of the long matrices for torch's product, one batch at a time.
    wide = 0 if method == "gram" else max(G.numel() for G in batches) * 4
    formula = 2 * 2 * elements + count * (2 * square + rounded) + max(5 * together * square, wide)
    with Allocations() as held:
        chains = kernel.polar.chains
        stacks = chains.chained_polar_factors([chains.Operand(G, chosen, EPS) for G in batches])
    assert {factors.dtype for factors in stacks} == {torch.float16}
    # Norms and their intermediate results are a few numbers a row; what is counted later is freed before.
    assert 2 * 2 * elements + count * square <= held.peak <= formula + 64 * m * count


@pytest.mark.parametrize("steps, restarts", [(1, ()), (5, ()), (5, (2,)), (5, (1, 3))])
def test_an_iteration_takes_the_flops_that_it_is_counted_with(kernel, steps, restarts):
    single, X = kernel.kernels.products.SINGLE, drawn((24, 40))
    schedule = kernel.schedules.resolve_schedule("polar_express", steps)
    windows, taken = kernel.stability.split(schedule, restarts), []
    for iterate in (
        lambda: kernel.kernels.newton_schulz.newton_schulz(X, schedule, single),
        lambda: kernel.kernels.newton_schulz.gram_newton_schulz(X, windows, single, X.dtype),
    ):
        with FlopCounterMode(display=False) as counted:
            iterate()
        taken.append(counted.get_total_flops())
    assert tuple(taken) == kernel.iteration.iteration_costs(24, 40, steps, len(windows), single)


@pytest.mark.parametrize("name, on_diagonal", [("BATCHED", True), ("SINGLE", False)])
def test_a_multiple_of_x_is_added_on_the_diagonal_where_adding_it_would_copy_x(kernel, name, on_diagonal):
    """In the standard iteration, and where a window of the Gram iteration is one step."""
    table, added, schedule = getattr(kernel.kernels.products, name), [], kernel.polar_express()
    noting = table._replace(affine=lambda B, X, a, out=None: added.append(a) or table.affine(B, X, a, out))
    X = drawn((1, 24, 40))[slice(None) if table.batched else 0]
    kernel.kernels.newton_schulz.newton_schulz(X, schedule, noting)
    kernel.kernels.newton_schulz.gram_newton_schulz(X, [[step] for step in schedule], noting, X.dtype)
    assert added == [0.0 if on_diagonal else a for a, _, _ in (*schedule, *schedule)]
