"""A step on a GPU that is not there: it never waits for the device, its launches are those of its batches, and each of
its passes moves the bytes that its formula names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from benchmarks.fake_gpu import (
    ADDEND,
    GPU,
    MATRICES,
    SYMMETRIC,
    WAYS,
    Unguarded,
    Work,
    counted_step,
    fake_gpu,
    fake_optimizer,
)
from benchmarks.shapes import MODELS, TINY_MODEL, Parameter, gpt2
from tests.support.inside import plan_of

# The optimizer compares the addresses of offloaded momentum, which are all 0 here; torch warns of that.
ADDRESSES = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decay_mode": "independent"},
        {"decay_mode": "cautious"},
        {"release_grads": False, "ns_method": "standard"},
        {"fallback": "nadamw"},
        {"second_moment": "rows", "renormalize": "frobenius"},
        {"renormalize": "rows_columns"},
        {"offload": True},
        {"lr": torch.tensor(1e-3, dtype=torch.float64), "weight_decay": torch.tensor(0.1)},
    ],
    ids=str,
)
@ADDRESSES
def test_a_step_never_waits_for_the_device(kernel, way, settings):
    """A copy to the host would be counted; reading a value would raise, as fake tensors have none."""
    with fake_gpu(kernel, way):
        assert not counted_step(fake_optimizer(kernel, TINY_MODEL, **settings)).syncs


@ADDRESSES
@pytest.mark.parametrize("way", WAYS)
def test_a_plain_step_copies_nothing(kernel, way):
    """Each pass writes where the next one reads; offloaded momentum is what has to be copied.

    What torch copies inside of its products has another name.
    """
    copies = {}
    for offload in (False, True):
        with fake_gpu(kernel, way):
            copies[offload] = counted_step(fake_optimizer(kernel, TINY_MODEL, offload=offload)).kernels["copy_"]
    assert copies[False] == 0 < copies[True]


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3, dtype=torch.float64)], ids=str)
def test_metrics_never_wait_for_the_device(kernel, lr):
    with fake_gpu(kernel, "symmetric"):
        optimizer = fake_optimizer(kernel, TINY_MODEL, lr=lr)
        optimizer.step()
        with Work() as work:
            optimizer.metrics()
        assert not work.syncs


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
    with FakeTensorMode(), Unguarded(), Work() as work:
        x, host = torch.ones(3, device="cuda"), torch.empty(3)
        host.copy_(x, non_blocking=True)
        x.copy_(host, non_blocking=True)
        host.to(x.device, non_blocking=True)
        assert not work.syncs
        host.copy_(x)
        x.cpu()
        x.copy_(host)
        host.to(x.device)
    assert sum(work.syncs.values()) == 4


@pytest.mark.parametrize("addition", ["add_", ADDEND])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_symmetric_kernel_adds_matrices_and_diagonals_itself(kernel, method, addition):
    """One launch of either kind for each step of each chain, which torch's products need besides their own."""
    added = {}
    for way in ("torch", "symmetric"):
        with fake_gpu(kernel, way):
            optimizer = fake_optimizer(kernel, TINY_MODEL, ns_method=method)
            added[way] = counted_step(optimizer).kernels[addition]
    assert added == {"torch": 5 * len(plan_of(optimizer).chains()), "symmetric": 0}


@pytest.mark.parametrize("beta, copies", [(0.5, 1), (0.0, 0)])
def test_torch_copies_the_addend_of_a_batch_of_products(beta, copies):
    """It does so while it finds out the result's shape, by a function that all devices share: what a CPU does shows it.

    If this fails, torch has changed, and steps on GPUs launch less than is counted.
    """
    A, B, C = torch.ones(3, 2, 8, 8).unbind()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.baddbmm(A, B, C, beta=beta)
    assert sum(event.name == "aten::copy_" for event in profiler.events()) == copies
    with FakeTensorMode(), Work() as work:
        A, B, C = (torch.empty(2, 8, 8, device="cuda") for _ in range(3))
        torch.baddbmm(A, B, C, beta=beta)
        torch.baddbmm(A, B, C, beta=beta, out=A)  # the addend is in its place
    assert work.kernels[ADDEND] == copies and work.kernels["baddbmm"] == 2


def test_large_matrices_come_in_batches_that_fill_their_waves(kernel):
    """At least nine of ten tiles' places in the waves of each m x m product of a large model are used."""
    predictions, multiprocessors = kernel.kernels.speeds.predictions, GPU[1]
    with fake_gpu(kernel, "symmetric"):
        optimizer = fake_optimizer(kernel, MODELS["llama-1b"])
        products = counted_step(optimizer).products
    squares = [p for p in products if p.operation == SYMMETRIC and p.size[2] == p.size[0] > predictions.CACHED]
    side = {p: -(-p.size[0] // predictions.TILE) for p in squares}
    tiles = [p.batch * side[p] * (side[p] + 1) // 2 for p in squares]
    assert tiles and all(n / (-(-n // multiprocessors) * multiprocessors) >= 0.9 for n in tiles)


@pytest.mark.parametrize("model, count", [("gpt2-124m", 3), ("moe-64", 1), ("llama-1b", 1), ("llama-8b", 1)])
def test_batches_with_one_short_side_share_a_chain_if_they_fit(kernel, model, count):
    """GPT-2's three long shapes do. One batch of a larger model takes most of the memory for a chain."""
    with fake_gpu(kernel, "compiled"):
        chains = plan_of(fake_optimizer(kernel, MODELS[model])).chains()
    longest = max(chains, key=len)
    assert len(longest) == count and len({min(batch.packed_shape) for batch in longest}) == 1
    assert all(batch.iteration.method == "gram" for batch in longest) or count == 1
    assert all(sum(b.packed_bytes for b in chain) <= kernel.polar.packing.BATCH_BYTES for chain in chains)


def test_a_shared_chain_is_multiplied_as_one_batch(kernel):
    """GPT-2's m x m products: 36 matrices in four rounds of 9; X Xᵀ and Q X once for each shape and window."""
    with fake_gpu(kernel, "compiled"):
        products = counted_step(fake_optimizer(kernel, MODELS["gpt2-124m"])).products
    squares = {
        p.batch: count for p, count in products.items() if p.size == (768, 768, 768) and p.operation == SYMMETRIC
    }
    long = {(p.operation, p.batch, p.size): count for p, count in products.items() if p.size != (768, 768, 768)}
    assert squares == {6: 20, 9: 4 * 14}
    assert long == {
        (SYMMETRIC, 12, (768, 768, 2304)): 2, (SYMMETRIC, 12, (768, 768, 3072)): 4,
        ("bmm", 12, (768, 2304, 768)): 2, ("bmm", 12, (768, 3072, 768)): 4,
    }  # fmt: skip


@pytest.mark.parametrize("side", [256, 512])
def test_small_matrices_come_in_even_pieces(kernel, side):
    """One more than the cache holds is not a piece of its own, which would take as long as a full one."""
    predictions = kernel.kernels.speeds.predictions
    together = predictions.matrices_together(predictions.Gpu(*GPU), side, torch.float16.itemsize)
    model = [Parameter(f"{i}.weight", (side, side), True) for i in range(together + 1)]
    with fake_gpu(kernel, "symmetric"):
        optimizer = fake_optimizer(kernel, model)
        pieces = {product.batch for product in counted_step(optimizer).products}
    assert len(plan_of(optimizer).batches) == 1 and pieces == {(together + 1) // 2, together + 1 - (together + 1) // 2}


def test_float32_products_of_a_method_are_noted(kernel):
    """Where they are the price of a method on a GPU: not where all is float32, and not on a CPU."""
    method = {"ns_method": "gram_float32"}
    cases = {"half": method, "all float32": {**method, "ns_dtype": "float32"}, "gram": {"ns_method": "gram"}}
    noted = {}
    for name, settings in cases.items():
        with fake_gpu(kernel, "torch"):
            notes = fake_optimizer(kernel, TINY_MODEL, **settings).explain().notes
        noted[name] = [note for note in notes if note.startswith("gram_float32")]
    on_cpu = kernel.Muon([("w", torch.nn.Parameter(torch.ones(8, 16)))], ns_dtype="bfloat16", **method)
    noted["cpu"] = [note for note in on_cpu.explain().notes if note.startswith("gram_float32")]
    (note,) = noted.pop("half")
    assert "at full float32 precision" in note and not any(noted.values())


@pytest.mark.parametrize("source", ["by the model", "shipped"])
def test_a_row_says_how_its_products_were_chosen(kernel, monkeypatch, source):
    pytest.importorskip("triton")
    kernels, gpu = kernel.kernels, kernel.kernels.speeds.predictions.Gpu(*GPU)
    entry = {"m": 4096, "k": 4096, **kernels.gpu.tuned.Config(128, 64, 8, 8, 3)._asdict(), "gain": 1.4}
    tables = {"by the model": {}, "shipped": {"symmetric_gemm": {"float16": [entry]}}}
    monkeypatch.setattr(kernels.speeds.measurements, "shipped", lambda name: (name, tables[source]))
    monkeypatch.setattr(kernels.speeds.gains, "key_of", lambda device: kernels.speeds.machine.gpu_key("Imagined GPU"))
    for module in (kernels.speeds.gains, kernel.polar.packing):
        monkeypatch.setattr(module, "gpu_of", lambda device: gpu)
    with FakeTensorMode(allow_non_fake_inputs=True):
        (row,) = fake_optimizer(kernel, [Parameter("a.weight", (4096, 4096), True)]).explain().rows
    assert row.kernel.endswith(f"symmetric_gemm + torch.bmm float16, {source}")


def test_launches_follow_batches_and_not_matrices(kernel):
    """Four shapes make two chains, of the square and of the long ones, in twelve layers as in two."""
    counts = {}
    for way in WAYS:
        for layers in (2, 12):
            with fake_gpu(kernel, way):
                optimizer = fake_optimizer(kernel, gpt2(layers=layers, hidden=256, vocabulary=64, context=8))
                counts[way, layers] = sum(counted_step(optimizer).kernels.values())
                batches, chains = len(plan_of(optimizer).batches), len(plan_of(optimizer).chains())
    assert all(counts[way, 2] == counts[way, 12] for way in WAYS)
    # Momentum and descent of each batch, and norms for both; a graph for each chain; AdamW with its count of steps.
    assert (batches, chains) == (4, 2) and counts["replayed", 12] == 4 * batches + chains + 2


@pytest.mark.parametrize("settings, passes", [({}, 2), ({"equalize": "rows"}, 3)], ids=str)
def test_kernels_that_take_the_roots_of_norms_are_counted(kernel, settings, passes):
    """Behind momentum and descent, and behind the pass over directions that equalizing asks for."""
    with fake_gpu(kernel, "torch"):
        optimizer = fake_optimizer(kernel, TINY_MODEL, **settings)
        kernels = counted_step(optimizer).kernels
    assert kernels["take_roots"] == passes * len(plan_of(optimizer).batches)


@pytest.mark.parametrize("count, launches", [(MATRICES, 1), (MATRICES + 1, 2)])
def test_long_lists_take_several_launches(kernel, count, launches):
    assert f"kMatrices = {MATRICES};" in Path("optimizer_cuda/tiles.cuh").read_text()
    with fake_gpu(kernel, "torch"):
        kernels = counted_step(fake_optimizer(kernel, [Parameter(f"{i}", (8, 16), True) for i in range(count)])).kernels
    assert kernels["momentum_pack_"] == kernels["descend_"] == launches and kernels["take_roots"] == 2
