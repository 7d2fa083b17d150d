"""`auto` on a CPU whose default is float32, which stands in for half precision there: it may lose digits for speed."""

from __future__ import annotations

import pytest
import torch

CPU, FLOAT32 = torch.device("cpu"), torch.float32


@pytest.fixture
def choose(kernel, monkeypatch):
    """`choose_iteration` in a dtype that nobody asked for, with the given products."""

    def chosen(m, n, device=CPU, dtype=FLOAT32, schedule=("polar_express", 5), table="NATIVE", **circumstances):
        products = getattr(kernel.kernels.products, table)._replace(source="by default")
        monkeypatch.setitem(kernel.iteration.choose_iteration.__globals__, "select_products", lambda *_: products)
        said = kernel.kernels.gains.Circumstances(**{"default_dtype": True, **circumstances})
        steps = kernel.schedules.resolve_schedule(*schedule)
        return kernel.iteration.choose_iteration(device, dtype, (m, n), steps, circumstances=said)

    return chosen


@pytest.mark.parametrize("table", ["SINGLE", "NATIVE", "NATIVE_SYMMETRIC"])
def test_size_alone_decides_whatever_the_products(kernel, choose, monkeypatch, table):
    """With 64 rows and more it is faster from twice as many columns on. Tables then differ by rounding alone."""
    monkeypatch.setattr(kernel.iteration, "torch_is_slow", lambda _: True)
    assert choose(64, 128, table=table).method == choose(500, 9000, table=table).method == "gram"
    assert choose(64, 127, table=table).method == choose(63, 500, table=table).method == "standard"


def test_digits_are_kept_where_someone_needs_them(choose):
    assert choose(64, 256).method == "gram"
    assert choose(64, 256, default_dtype=False).method == "standard"
    assert choose(64, 256, transformed=True).method == "standard"
    assert choose(64, 256, dtype=torch.float64).method == "standard"
    assert choose(64, 256, device=torch.device("mps")).method == "standard"


@pytest.mark.parametrize("steps", range(5, 11))
@pytest.mark.parametrize("schedule", ["polar_express", "polar_express_safer", "quintic", "original"])
def test_rounding_changes_less_than_half_precision_would(kernel, choose, schedule, steps):
    """More steps restart, or stay with the standard iteration, before the bound exceeds a hundredth."""
    iteration = choose(64, 1024, schedule=(schedule, steps))
    lengths = [len(window) for window in iteration.windows]
    restarts = tuple(sum(lengths[:i]) for i in range(1, len(lengths)))
    roundoff = torch.finfo(FLOAT32).eps / 2
    resolved = kernel.schedules.resolve_schedule(schedule, steps)
    change = kernel.stability.amplification(resolved, restarts, roundoff) * roundoff
    assert change <= 1e-2 or iteration.method == "standard"
    assert iteration.method == "gram" or steps > 5


@pytest.mark.parametrize("slow, method", [(True, "gram"), (False, "standard")])
def test_torchs_products_have_to_keep_float32(kernel, choose, monkeypatch, slow, method):
    """On a CPU with instructions for bfloat16 a setting of oneDNN lets them round factors to it."""
    monkeypatch.setattr(kernel.iteration, "torch_is_slow", lambda _: slow)
    assert choose(128, 512, table="SINGLE").method == method
    assert choose(128, 512, table="NATIVE").method == "gram"


@pytest.mark.parametrize("asked", [None, "float32"])
def test_a_dtype_that_was_asked_for_keeps_its_digits(kernel, monkeypatch, asked):
    """In a function and in a step."""
    monkeypatch.setattr(kernel.iteration, "CPU_WORK_DTYPE", torch.float32)
    G = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    expected = kernel.orthogonalize(G, dtype=torch.float32, method="standard" if asked else "gram")
    assert torch.equal(kernel.orthogonalize(G, dtype=None if asked is None else torch.float32), expected)
    p = torch.nn.Parameter(torch.zeros_like(G))
    p.grad = G.clone()
    optimizer = kernel.Muon(
        [("weight", p)], ns_dtype=asked, adjust_lr_fn="original", lr=1.0, weight_decay=0.0, momentum=0.0
    )
    optimizer.step()
    assert torch.equal(p.detach(), -expected)
    assert f"{'standard' if asked else 'gram'} " in next(iter(optimizer.explain())).kernel
