"""A step on a GPU that is not there: it never waits for the device, and its launches are those of its batches."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fake_gpu import GPU, WAYS, Work, counted_step, fake_gpu, fake_optimizer
from benchmarks.shapes import MODELS, TINY_MODEL, gpt2, matrix_counts


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"decay_mode": "independent"}, {"release_grads": False, "ns_method": "standard"}, {"fallback": "nadamw"}],
    ids=str,
)
def test_a_step_never_waits_for_the_device(kernel, way, settings):
    """A copy to the host would be counted; reading a value would raise, as fake tensors have none."""
    with fake_gpu(kernel, way):
        assert not counted_step(fake_optimizer(kernel, TINY_MODEL, **settings)).syncs


def test_a_scaled_step_never_waits_for_the_device(kernel):
    with fake_gpu(kernel, "torch"):
        optimizer = fake_optimizer(kernel, TINY_MODEL)
        optimizer.step()
        optimizer.grad_scale, optimizer.found_inf = (torch.ones((), device="cuda") for _ in range(2))
        with Work() as work:
            optimizer.step()
        assert not work.syncs


@pytest.mark.parametrize("settings, passes", [({}, False), ({"equalize": "rows"}, True)], ids=str)
def test_norms_come_from_the_packing_pass(kernel, settings, passes):
    """Rows of norm 1 have another norm than the momentum that was packed."""
    with fake_gpu(kernel, "symmetric"):
        kernels = counted_step(fake_optimizer(kernel, TINY_MODEL, **settings)).kernels
    assert kernels["momentum_pack_"] and bool(kernels["frobenius_norm_"]) == passes


@pytest.mark.parametrize("way", WAYS)
def test_norms_of_updates_come_from_the_descent(kernel, way):
    with fake_gpu(kernel, way):
        kernels = counted_step(fake_optimizer(kernel, TINY_MODEL)).kernels
    assert kernels["descend_"] and not kernels["linalg_vector_norm"]


def test_what_waits_is_counted():
    with torch._subclasses.FakeTensorMode(), Work() as work:
        torch.ones(3, device="cuda").cpu()
    assert sum(work.syncs.values()) == 1


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_symmetric_kernel_adds_to_diagonals_itself(kernel, method):
    """One launch for each step of each batch, which torch's products need besides their own."""
    added = {}
    for way in ("torch", "symmetric"):
        with fake_gpu(kernel, way):
            optimizer = fake_optimizer(kernel, TINY_MODEL, ns_method=method)
            added[way] = counted_step(optimizer).kernels["add_"]
    assert added == {"torch": 5 * len(optimizer._plan.batches), "symmetric": 0}


def test_large_matrices_come_in_batches_that_fill_their_waves(kernel):
    """At least nine of ten tiles' places in the waves of each m x m product of a large model are used."""
    predictions, multiprocessors = kernel.kernels.predictions, GPU[1]
    with fake_gpu(kernel, "symmetric"):
        optimizer = fake_optimizer(kernel, MODELS["llama-1b"])
        products = counted_step(optimizer).products
    squares = [
        p for p in products if p.operation == "symmetric_gemm_" and p.size[2] == p.size[0] > predictions.SMALLEST
    ]
    side = {p: -(-p.size[0] // predictions.TILE) for p in squares}
    tiles = [p.batch * side[p] * (side[p] + 1) // 2 for p in squares]
    assert tiles and all(n / (-(-n // multiprocessors) * multiprocessors) >= 0.9 for n in tiles)


@pytest.mark.parametrize("model, shared", [("gpt2-124m", 1), ("moe-64", 0), ("llama-1b", 0), ("llama-8b", 0)])
def test_few_sizes_with_one_short_side_take_the_gram_iteration(kernel, model, shared):
    """If they were many, it would pay to work on their Gram matrices in one batch."""
    sizes = {tuple(sorted(shape)) for shape in matrix_counts(MODELS[model])}
    with fake_gpu(kernel, "symmetric"):
        schedule, device = kernel.schedules.resolve_schedule("polar_express", 5), torch.device("cuda", 0)
        choose = kernel.iteration.choose_iteration
        methods = {size: choose(device, torch.float16, size, schedule).method for size in sizes}
    assert all(methods[size] == "standard" for size in sizes if size[0] == size[1])
    short_sides = [size[0] for size in sizes if methods[size] == "gram"]
    assert len(short_sides) - len(set(short_sides)) == shared


def test_launches_follow_batches_and_not_matrices(kernel):
    """Four shapes make four batches, in twelve layers as in two."""
    counts = {}
    for way in WAYS:
        for layers in (2, 12):
            with fake_gpu(kernel, way):
                optimizer = fake_optimizer(kernel, gpt2(layers=layers, hidden=256, vocabulary=64, context=8))
                counts[way, layers] = sum(counted_step(optimizer).kernels.values())
                batches = len(optimizer._plan.batches)
    assert all(counts[way, 2] == counts[way, 12] for way in WAYS)
    # Momentum, the graph, descent; and AdamW with its count of steps.
    assert counts["replayed", 12] == 3 * batches + 2
