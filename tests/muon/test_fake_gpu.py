"""A step on a GPU that is not there: it never waits for the device, its launches are those of its batches, and each of
its passes moves the bytes that its formula names.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.fake_gpu import GPU, WAYS, Work, counted_step, fake_gpu, fake_optimizer
from benchmarks.predicted_step import ADAMW_BYTES
from benchmarks.shapes import MODELS, TINY_MODEL, gpt2


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


FULL, HALF = torch.float32, torch.float16


def moved(operation, *operands: torch.Tensor | list[torch.Tensor], **options) -> int:
    with Work() as work:
        operation(*operands, **options)
    assert sum(work.kernels.values()) == 1
    return work.bytes


@pytest.mark.parametrize("momentum, packed", [(FULL, FULL), (FULL, HALF), (torch.bfloat16, HALF)])
def test_packing_reads_gradient_and_momentum_and_writes_momentum_and_directions(kernel, momentum, packed):
    with fake_gpu(kernel, "torch"):
        G, M = (torch.empty(48, 80, device="cuda", dtype=momentum) for _ in range(2))
        U, norms = torch.empty(1, 48, 80, device="cuda", dtype=packed), torch.empty(1, device="cuda", dtype=FULL)
        found = moved(kernel.kernels.native.momentum_pack_, [M], [G], U, 0.9, True, norms=norms)
    assert found == G.numel() * (3 * momentum.itemsize + packed.itemsize) + norms.itemsize


@pytest.mark.parametrize("parameter, update", [(FULL, HALF), (FULL, FULL), (torch.bfloat16, HALF)])
def test_descent_reads_parameter_and_update_and_writes_the_parameter(kernel, parameter, update):
    with fake_gpu(kernel, "torch"):
        P, U = (
            torch.empty(*size, device="cuda", dtype=d) for size, d in [((48, 80), parameter), ((1, 48, 80), update)]
        )
        numbers = [torch.empty(1) for _ in range(3)]
        found = moved(kernel.kernels.native.descend_, [P], U, *numbers)
    assert found == P.numel() * (2 * parameter.itemsize + update.itemsize)


def test_normalizing_reads_a_matrix_and_its_norm_and_writes_another_matrix(kernel):
    with fake_gpu(kernel, "torch"):
        X, out = (torch.empty(1, 48, 80, device="cuda", dtype=dtype) for dtype in (FULL, HALF))
        norms = torch.empty(1, device="cuda", dtype=torch.float64)
        found = moved(kernel.kernels.native.normalize_, out, X, norms, 1e-7, 1.0)
    assert found == X.numel() * (4 + 2) + 8


def test_adamw_only_reads_the_gradient_and_changes_the_other_three():
    with torch._subclasses.FakeTensorMode():
        tensors = [[torch.empty(5000, device="cuda")] for _ in range(4)]
        numbers = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
        flags = {"amsgrad": False, "maximize": False}
        found = moved(torch._fused_adamw_, *tensors, [], [torch.ones(())], **numbers, **flags)
    assert found == 5000 * (4 + 3 * 8) == 5000 * ADAMW_BYTES


def test_a_product_reads_a_matrix_and_its_transpose_once_and_only_writes_its_result(kernel):
    with fake_gpu(kernel, "symmetric"):
        X, C = (torch.empty(2, 48, k, device="cuda", dtype=HALF) for k in (80, 48))
        scalars = [torch.ones(()) for _ in range(3)]
        product = kernel.kernels.symmetric_gemm.symmetric_gemm_
        gram, square = moved(product, X, X.mT, None, C, *scalars), moved(product, C, C, C, C.clone(), *scalars)
    assert (gram, square) == (2 * (X.numel() + C.numel()), 2 * 2 * C.numel())


def test_what_is_changed_in_place_moves_twice_and_what_is_overwritten_once():
    with torch._subclasses.FakeTensorMode():
        x, y = (torch.empty(1000, device="cuda") for _ in range(2))
        found = [moved(f, *given) for f, given in [(x.mul_, (2.0,)), (x.fill_, (1.0,)), (x.zero_, ()), (x.add, (y,))]]
    assert found == [8000, 4000, 4000, 12000]


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


@pytest.mark.parametrize("model, shared", [("gpt2-124m", 2), ("moe-64", 1), ("llama-1b", 1), ("llama-8b", 1)])
def test_few_shapes_with_one_short_side_take_the_gram_iteration(kernel, model, shared):
    """Tall and wide matrices form separate batches, so shapes count, not sizes; squares take the standard iteration."""
    with fake_gpu(kernel, "compiled"):
        batches = fake_optimizer(kernel, MODELS[model])._plan.batches
    chains = {batch.packed_shape for batch in batches if batch.iteration.method == "gram"}
    assert all(batch.iteration.method == "standard" for batch in batches if len(set(batch.packed_shape)) == 1)
    assert len(chains) - len({min(shape) for shape in chains}) == shared


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
