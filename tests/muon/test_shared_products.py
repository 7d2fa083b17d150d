"""Steps whose batches share m x m products, as on a GPU, on a CPU: they have the bits of batches that share none."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from benchmarks.step_costs import replaced
from tests.support.allocations import Allocations
from tests.support.graphs_of_updates import counted_graphs, same_bits, steps
from tests.support.inside import plan_of
from tests.support.shared_products import shared_as_on_a_gpu

# Three shapes with one short side, one with another, and a vector.
SHAPES = [(12, 20)] * 3 + [(30, 12)] * 2 + [(12, 40), (8, 24), (20,)]
SETTINGS = dict(lr=2e-2, weight_decay=0.1, ns_dtype="float32", ns_method="gram")


@pytest.fixture
def sharing(kernel):
    if not kernel.iteration.select_products(torch.device("cpu"), torch.float32, 12, 20, method="gram").batched:
        pytest.skip("needs products of this processor whose bits do not depend on the batch")
    return partial(shared_as_on_a_gpu, kernel)


def parameters() -> list[tuple[str, Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"layers.{i}.weight", Parameter(torch.randn(s, generator=generator))) for i, s in enumerate(SHAPES)]


def lost(optimizer, step: int) -> None:
    """Take away gradients: of one matrix of a shape, of a whole shape, of all that share products."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number in {0: (1,), 1: (5,), 2: range(6), 3: ()}[step]:
        params[number].grad = None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decay_mode": "cautious", "momentum_dtype": "bfloat16"},
        {"second_moment": "rows"},
        {"equalize": "rows", "renormalize": "columns"},
        {"experimental_hyperball": True, "weight_decay": 0.0},
        {"release_grads": True},
    ],
    ids=str,
)
def test_shared_products_change_no_bit(kernel, sharing, settings):
    settings = {**SETTINGS, **settings}
    expected = steps(kernel.Muon(parameters(), **settings), 4)
    with sharing():
        optimizer = kernel.Muon(parameters(), **settings)
        tensors = steps(optimizer, 4)
        assert sorted(map(len, plan_of(optimizer).chains())) == [1, 3]
        assert "6 matrices with a short side of 12 share their 12 x 12 products" in optimizer.explain().notes
    assert same_bits(tensors, expected)


def test_groups_that_differ_share_products_and_keep_their_rules(kernel, sharing):
    """Among them an eps that no direction reaches."""

    def optimizer():
        named = parameters()
        other = {"eps": 100.0, "lr": 0.3, "momentum": 0.5, "equalize": "columns"}
        return kernel.Muon([{"params": named[:2]}, {"params": named[2:], **other}], **SETTINGS)

    expected = steps(optimizer())
    with sharing():
        sharing_one = optimizer()
        assert same_bits(steps(sharing_one), expected)
        assert max(map(len, plan_of(sharing_one).chains())) == 4


def test_what_goes_twice_through_the_iteration_shares_nothing(kernel, sharing):
    settings = {**SETTINGS, "equalize": "experimental_aurora"}
    expected = steps(kernel.Muon(parameters(), **settings))
    with sharing():
        optimizer = kernel.Muon(parameters(), **settings)
        assert same_bits(steps(optimizer), expected)
        assert all(len(chain) == 1 for chain in plan_of(optimizer).chains())


def test_missing_gradients_leave_the_others_their_bits(kernel, sharing):
    results = []
    for context in (torch.no_grad, sharing):
        with context():
            optimizer = kernel.Muon(parameters(), **SETTINGS)
            results.append(steps(optimizer, 4, before=lambda step, optimizer=optimizer: lost(optimizer, step)))
    assert same_bits(*results)


def test_offloaded_momentum_comes_batch_by_batch(kernel, sharing):
    expected = steps(kernel.Muon(parameters(), **SETTINGS))
    with sharing():
        optimizer = kernel.Muon(parameters(), offload=True, **SETTINGS)
        assert same_bits(steps(optimizer), expected)
        assert all(len(chain) == 1 for chain in plan_of(optimizer).chains())


@pytest.mark.parametrize(
    "most, lengths",
    [(12 * 4 * (20 * 3 + 30 * 2), [1, 1, 2]), (12 * 4 * (20 * 3 + 30 * 2 + 40), [1, 3]), (1, [1, 1, 1, 1])],
)
def test_a_chain_packs_as_much_as_its_limit_and_no_more(kernel, sharing, monkeypatch, most, lengths):
    monkeypatch.setattr(kernel.plan.batches, "BATCH_BYTES", most)
    with sharing():
        optimizer = kernel.Muon(parameters(), **SETTINGS)
        optimizer.step()
        chains = plan_of(optimizer).chains()
        assert sorted(map(len, chains)) == lengths
        assert all(len(chain) == 1 or sum(batch.packed_bytes for batch in chain) <= most for chain in chains)


def test_chains_may_have_another_limit(kernel, sharing):
    with sharing():
        optimizer = kernel.Muon(parameters(), **SETTINGS)
        optimizer.step()
        chains = [kernel.plan.batches.chains(plan_of(optimizer).batches, most) for most in (None, 1)]
    assert max(map(len, chains[0])) > max(map(len, chains[1])) == 1


@pytest.mark.parametrize("method, dtype", [("gram", "float32"), ("gram_float32", "float16")])
def test_a_chain_takes_no_more_memory_than_is_planned(kernel, sharing, method, dtype):
    """What ranks say they hold is the sum of a chain's batches. At least copies and factors are held at once."""
    products, update = kernel.kernels.products, kernel.step.polar_update
    with sharing(), replaced(kernel, {products.select_products: lambda *_, **__: products.BATCHED}):
        optimizer = kernel.Muon(parameters(), **{**SETTINGS, "ns_method": method, "ns_dtype": dtype})
        optimizer.step()
        chain = max(plan_of(optimizer).chains(), key=len)
        members = []
        for batch in chain:
            directions = update.packed_memory(batch, len(batch.matrices)).fill_(1.0)
            members.append(update.Packed(batch, 1e-7, directions, None))
        with Allocations() as held:
            update.polar_updates(members)
        factors = sum(batch.memory_bytes - batch.packed_bytes for batch in chain)
        assert 2 * factors <= held.peak <= factors + sum(batch.work_bytes for batch in chain)


def test_metrics_are_those_of_batches_that_share_nothing(kernel, sharing):
    def metrics():
        optimizer = kernel.Muon(parameters(), **SETTINGS)
        steps(optimizer, 1)
        return optimizer.metrics()

    expected = metrics()
    with sharing():
        readings = metrics()
    assert readings.keys() == expected.keys() and readings["matrices"] == expected["matrices"] == 7
    # The same norms, whose squares are added in another order.
    for key, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(readings[key]), torch.as_tensor(value), rtol=1e-6, atol=0)


def test_a_chain_is_one_graph(kernel, sharing):
    expected = steps(kernel.Muon(parameters(), **SETTINGS))
    with sharing(), counted_graphs(kernel, "cpu") as counted:
        optimizer, said = kernel.Muon(parameters(), **SETTINGS), []
        optimizer.warmup(lambda done, total, what: said.append(what), budget=0)
        assert counted.captures == 2 and any(what.count(" with ") == 2 for what in said)
        assert "4 of 4 batches replay a CUDA graph, captured by warmup()" in optimizer.explain().notes
        tensors = steps(optimizer, before=lambda step: counted.spoil(optimizer))
        assert counted.replays - counted.captures == 3 * 2
    assert same_bits(tensors, expected)


def test_a_chain_is_eager_if_a_graph_gives_one_batch_other_bits(kernel, sharing, monkeypatch):
    with sharing(), counted_graphs(kernel, "cpu") as counted:

        def wrong(work, device, pool):
            replay, (members,) = counted.captured(work, device, pool), work.args
            return lambda: [replay(), members[0].factors.view(-1)[:1].mul_(2.0)]

        monkeypatch.setattr(kernel.step.graphs, "captured", wrong)
        optimizer = kernel.Muon(parameters(), **SETTINGS)
        with pytest.warns(RuntimeWarning, match="other bits than eager launches"):
            optimizer.warmup(lambda *_: None, budget=0)
        assert "0 of 4 batches replay a CUDA graph, captured by warmup()" in optimizer.explain().notes


def test_a_chain_that_misses_a_gradient_is_eager_in_that_step(kernel, sharing):
    results = []
    for context in (torch.no_grad, sharing):
        with context(), counted_graphs(kernel, "cpu") as counted:
            optimizer = kernel.Muon(parameters(), **SETTINGS)
            optimizer.warmup(lambda *_: None, budget=0)
            before = counted.replays
            results.append(steps(optimizer, 4, before=lambda step, optimizer=optimizer: lost(optimizer, step)))
            replays = counted.replays - before
    assert same_bits(*results)
    assert replays == 4 + 1  # the other short side in each step, and the chain in the last


def test_matrices_that_share_products_are_counted_over_all_chains_of_a_side(kernel):
    """A batch alone shares with nothing."""
    batches = {(12, 20): 3, (12, 30): 2, (12, 40): 1, (12, 50): 4, (16, 20): 1, (16, 30): 1, (8, 8): 9}
    made = [SimpleNamespace(packed_shape=shape, matrices=range(count)) for shape, count in batches.items()]
    plan = SimpleNamespace(chains=lambda: [made[:2], made[2:4], made[4:6], made[6:]])
    assert importlib.import_module(".explain.routes", kernel.__name__)._shared_products(plan) == [
        "10 matrices with a short side of 12 share their 12 x 12 products, in 2 chains",
        "2 matrices with a short side of 16 share their 16 x 16 products",
    ]
