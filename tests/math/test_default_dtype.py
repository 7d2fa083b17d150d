"""`auto` on a CPU whose default is float32, which stands in for half precision there: it may lose digits for speed."""

from __future__ import annotations

import pytest
import torch

CPU, FLOAT32 = torch.device("cpu"), torch.float32


@pytest.fixture
def processor(kernel, monkeypatch, tmp_path):
    """Makes this processor one of a maker, with some instructions, to which a compiled build has access or has not."""

    def become(maker: str, instructions: set, compiled: str | None):
        facts, products = tmp_path / "cpuinfo", kernel.kernels.native_products
        facts.write_text(f"processor\t: 0\nvendor_id\t: {maker}\n\nprocessor\t: 1\nvendor_id\t: Another\n")
        monkeypatch.setattr(kernel.kernels.speeds.machine, "_CPU_FACTS", facts)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "avx512_bf16" in instructions)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: "amx" in instructions)
        monkeypatch.setattr(products, "IS_PORTABLE", compiled is None)
        monkeypatch.setitem(products.INSTRUCTIONS, torch.bfloat16, compiled or "portable")

    return become


@pytest.mark.parametrize(
    "maker, instructions, compiled, is_faster",
    [
        ("GenuineIntel", {"amx", "avx512_bf16"}, "amx", True),
        ("GenuineIntel", {"amx", "avx512_bf16"}, None, True),
        ("GenuineIntel", {"amx", "avx512_bf16"}, "avx512_bf16", False),  # the system refuses AMX to a process
        ("GenuineIntel", {"avx512_bf16"}, "avx512_bf16", False),
        ("GenuineIntel", {"avx512_bf16"}, None, False),
        ("AuthenticAMD", {"avx512_bf16"}, "avx512_bf16", True),
        ("AuthenticAMD", {"avx512_bf16"}, None, True),
        ("AuthenticAMD", set(), "portable", False),
    ],
)
def test_the_faster_dtype_is_the_default(kernel, processor, maker, instructions, compiled, is_faster):
    """By the processor, not by a race: what a run computes does not depend on what else the machine did."""
    processor(maker, instructions, compiled)
    assert kernel.kernels.native_products.bfloat16_is_faster() == is_faster


def test_windows_names_the_maker_in_its_description_of_a_processor(kernel, monkeypatch, tmp_path):
    machine = kernel.kernels.speeds.machine
    monkeypatch.setattr(machine, "_CPU_FACTS", tmp_path / "absent")
    for words, expected in ("Intel64 Family 6 Model 207 Stepping 2, GenuineIntel", True), ("arm", False), ("", False):
        monkeypatch.setattr(machine.platform, "processor", lambda words=words: words)
        assert machine.is_made_by_intel() == expected


@pytest.fixture
def choose(kernel, monkeypatch):
    """`choose_iteration` in a dtype that nobody asked for, with the given products."""

    def chosen(m, n, device=CPU, dtype=FLOAT32, schedule=("polar_express", 5), table="NATIVE", **circumstances):
        products = kernel.kernels.products.cpu_tables(FLOAT32)[table]._replace(source="by default")
        monkeypatch.setitem(kernel.iteration.choose_iteration.__globals__, "select_products", lambda *_: products)
        said = kernel.kernels.circumstances.Circumstances(**{"default_dtype": True, **circumstances})
        steps = kernel.schedules.resolve_schedule(*schedule)
        return kernel.iteration.choose_iteration(device, dtype, (m, n), steps, circumstances=said)

    return chosen


@pytest.mark.parametrize("table", ["SINGLE", "NATIVE", "NATIVE_SYMMETRIC"])
def test_size_alone_decides_whatever_the_products(kernel, choose, monkeypatch, table):
    """Twice as many columns as rows, or 512 columns of fewer than 64 rows. Tables then differ by rounding alone."""
    monkeypatch.setattr(kernel.iteration, "torch_is_slow", lambda _: True)
    for m, n in (64, 128), (500, 9000), (63, 512), (4, 512):
        assert choose(m, n, table=table).method == "gram"
    for m, n in (64, 127), (500, 999), (63, 511), (4, 511):
        assert choose(m, n, table=table).method == "standard"


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
    monkeypatch.setattr(kernel.iteration, "torch_is_slow", lambda _: True)  # else torch's products keep `standard`
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
