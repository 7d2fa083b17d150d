"""Small matrices' operation on CPUs, on a GPU and under tracing; its kernel is in `test_small_polar_laws`."""

from __future__ import annotations

import contextlib
import importlib
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.small_polynomial import (
    SCALE,
    SCHEDULE,
    SIZES,
    check_polar,
    in_windows,
    matrices,
    prove_small,
    steps_of,
)
from tests.support.symmetric_products import DTYPES, WrongResultError, every_other
from tests.support.triton_gpu import skip_without_triton

pytest.importorskip("triton")

EPS = 1e-7
# How matrices lie in memory; tall ones come as their transposed view.
LAYOUTS = {"tall": lambda G: G.mT.contiguous().mT, "sliced": every_other}
WINDOWS = in_windows(SCHEDULE, (1, 2), SCALE)


@pytest.fixture(scope="module")
def module(kernel):
    return importlib.import_module(f"{kernel.__name__}.kernels.gpu.small_polar")


@pytest.fixture
def device(kernel, device):
    """A device on which the package launches Triton's kernels, if it is a GPU."""
    skip_without_triton(kernel, device)
    return device


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, n", SIZES)
def test_error_is_that_of_the_iterations_roundings(module, device, dtype, m, n):
    G = matrices(2, m, n).to(dtype)
    check_polar(
        module.small_polar(G, WINDOWS, SCALE, EPS, dtype, torch.empty_like(G, dtype=torch.float32)),
        G,
        WINDOWS,
        SCALE,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_are_read_and_nothing_around_is_written(module, device, dtype, layout):
    for m, n in (1, 1), (7, 7), (13, 40), (60, 300), (128, 129):
        G = matrices(2, m, n)
        buffer = G.new_full((3, 2 * m + 1, 2 * n + 3), 7.0, dtype=dtype)
        C = buffer[1:, 1::2, 3::2].fill_(math.nan)
        module.small_polar_(LAYOUTS[layout](G), C, steps_of(WINDOWS), SCALE, EPS, dtype)
        check_polar(C, G, WINDOWS, SCALE, dtype)
        C.fill_(7.0)
        assert (buffer == 7.0).all()


# What may go wrong in a launch.
FAULTS = {
    "wrong": lambda C: C * 1.02,
    "NaN is lost": lambda C: C.nan_to_num(),
    "NaN spreads": lambda C: C + 0 * C.sum(),
    "knows its batch": lambda C: C * (1 + len(C) * torch.finfo(C.dtype).eps),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_proof_finds_what_is_wrong(module, fault):
    spoil = FAULTS.get(fault, lambda C: C)

    def launch(G, C, steps, scaling) -> None:
        module.small_polar_(G, C, steps, *scaling)
        C.copy_(spoil(C))

    with pytest.raises(WrongResultError) if fault else contextlib.nullcontext():
        prove_small(launch, 16, torch.float16)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_on_a_cpu_too_a_matrix_is_alone_in_a_batch(module, bad):
    G = matrices(3, 40, 70)
    together = module.small_polar(G, WINDOWS, SCALE, EPS, torch.float16)
    for i in range(3):
        assert torch.equal(module.small_polar(G[i : i + 1], WINDOWS, SCALE, EPS, torch.float16), together[i : i + 1])
    G[1, 3, 20] = bad
    spoiled = module.small_polar(G, WINDOWS, SCALE, EPS, torch.float16)
    assert spoiled[1].isnan().all() and torch.equal(spoiled[::2], together[::2])


@pytest.mark.kernels_ci
def test_on_a_cpu_too_sizes_of_numbers_do_not_matter(module):
    G = matrices(1, 17, 40)
    result = module.small_polar(G, WINDOWS, SCALE, 0.0, torch.float16)
    for exponent in (-110, 100):
        assert torch.equal(module.small_polar(G * 2.0**exponent, WINDOWS, SCALE, 0.0, torch.float16), result)
    zero = torch.zeros_like(G)
    assert torch.equal(module.small_polar(zero, WINDOWS, SCALE, 0.0, torch.float32), zero)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)], ids=str)
def test_no_matrices_rows_or_columns_are_an_empty_result(module, shape):
    assert module.small_polar(torch.empty(shape), WINDOWS, SCALE, EPS, torch.float16).shape == shape


def test_the_result_of_a_transposed_view_is_one(module):
    """So that what a tall matrix gives is contiguous."""
    C = module.small_polar(matrices(2, 40, 17).mT, WINDOWS, SCALE, EPS, torch.float16)
    assert C.mT.is_contiguous() and C.dtype == torch.float16


def test_short_sides_up_to_128_fit_in_either_direction(module):
    assert all(module.fits(m, n, dtype) for m, n in [(1, 1), (128, 128), (4096, 128), (16, 10**6)] for dtype in DTYPES)
    assert not module.fits(129, 129, torch.float16)
    assert not module.fits(64, 64, torch.float64)
    assert not module.fits(128, 2**24, torch.float16), "offsets of 31 bits do not reach the last entry of X"


def operands(**changed) -> dict:
    G = matrices(2, 6, 9)
    values = {"G": G, "C": torch.full_like(G, 7.0), "steps": steps_of(WINDOWS), "scale": SCALE, "eps": EPS}
    return values | {"work_dtype": torch.float16} | changed


def test_the_operation_keeps_torchs_rules_for_operators(module):
    utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(module.small_polar_, (), operands(), test_utils=utilities)


def test_a_compiled_orthogonalization_is_the_eager_one(module):
    graphs = CompileCounterWithBackend("aot_eager")

    def factors(G):
        return module.small_polar(G, WINDOWS, SCALE, EPS, torch.float16)

    compiled = torch.compile(factors, fullgraph=True, backend=graphs)
    for seed in (0, 1):
        G = matrices(2, 6, 9, seed)
        assert torch.equal(compiled(G), factors(G))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpus_orthogonalization_is_traced_without_the_gpu(module, dtype):
    def factors(G):
        return module.small_polar(G, WINDOWS, SCALE, EPS, dtype, torch.empty_like(G, dtype=torch.float32))

    with FakeTensorMode():
        G = torch.empty(3, 9, 6, dtype=torch.bfloat16, device="cuda").mT
        C = factors(G)
        assert (C.shape, C.stride(), C.dtype, C.device.type) == (G.shape, G.stride(), torch.float32, "cuda")
        graph = make_fx(factors, tracing_mode="fake")(G).graph
        with pytest.raises(ValueError, match="G must be"):
            factors(torch.empty(6, 9, device="cuda"))
        with pytest.raises(ValueError, match=r"C must be .* on cuda:0, got .* on cpu"):
            module.small_polar(G, WINDOWS, SCALE, EPS, dtype, torch.empty(3, 6, 9))
    assert len([node for node in graph.nodes if "small_polar" in node.name]) == 1


BAD = {
    r"G must be .b, m, n. with m <= 128 .* got \(6, 9\)": lambda v: {"G": v["G"][0]},
    r"G must be .* got \(1, 129, 2\)": lambda v: {"G": torch.ones(1, 129, 2)},
    r"G must be .* torch.float64": lambda v: {"G": v["G"].double()},
    r"G must have at most 134217600 columns": lambda v: {"G": torch.ones(2, 6, 1).expand(2, 6, 2**27)},
    r"C must be \(2, 6, 9\) .* got \(2, 6, 8\)": lambda v: {"C": v["C"][..., :8]},
    r"C must be .* torch.float16 or torch.float32 on cpu, got .* torch.bfloat16": lambda v: {"C": v["C"].bfloat16()},
    r"C must be .* on cpu, got .* on meta": lambda v: {"C": v["C"].to("meta")},
    r"C must have a place for each entry, got \(2, 6, 9\)": lambda v: {"C": v["C"][:1].expand(2, 6, 9)},
    r"C must not share its storage with G": lambda v: {"G": v["C"]},
    r"the work dtype must be .* got torch.float64": lambda v: {"work_dtype": torch.float64},
    r"steps must be 1 to 31 steps .* got \[\]": lambda v: {"steps": []},
    r"steps must be .* got \[1.0, 2.0, 3.0\]": lambda v: {"steps": [1.0, 2.0, 3.0]},
    r"steps must be .* of which the last ends one": lambda v: {"steps": [1.0, 2.0, 3.0, 0.0]},
    r"steps must be .* 1 where a window ends": lambda v: {"steps": [1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0, 1.0]},
    r"steps must be 1 to 31": lambda v: {"steps": [1.0, 2.0, 3.0, 1.0] * 32},
    r"scale must be positive and finite .* got 0.0": lambda v: {"scale": 0.0},
    r"scale must be .* got inf": lambda v: {"scale": math.inf},
    r"eps at least 0, got 4.0 and -1.0": lambda v: {"eps": -1.0},
    r"eps at least 0, got 4.0 and nan": lambda v: {"eps": math.nan},
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("message", BAD)
def test_misfits_raise_and_write_nothing(module, message):
    values = operands()
    values |= BAD[message](values)
    before = values["C"].clone()
    with pytest.raises(ValueError, match=message):
        module.small_polar_(**values)
    assert values["C"].is_meta or torch.equal(values["C"], before)


@pytest.mark.parametrize("hip", [None, "6.0"], ids=["cuda", "hip"])
def test_launch_is_on_the_device_of_its_operands(module, monkeypatch, hip):
    """Numbers are arguments of a launch that is captured; a tensor of them would have to be copied to the device."""
    current, launches = [], []

    @contextlib.contextmanager
    def device(wanted):
        current.append(wanted)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launches.append((current[-1], grid, args, options))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imagined GPU")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(module, "_small_polar_kernel", Kernel())
    values = operands()
    module._on_gpu(**values)
    ((wanted, grid, (G, C, scratch, coefficients, ends, *_), options),) = launches
    assert wanted == G.device and grid == (2,) and C is values["C"]
    assert coefficients == tuple(x for window in WINDOWS for step in window for x in step) and ends == 0b101
    assert scratch.dtype == torch.float16 and ("maxnreg" in options) == (hip is None)
