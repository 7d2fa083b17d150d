"""When the compiled product for Hopper is launched, and with what; no GPU is needed: its operation is a stand-in."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tools.lint import compiled

HALF = torch.float16


class Operation:
    """Stands for `hopper_gemm_`: keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)


@pytest.fixture
def package(monkeypatch):
    """The package's modules by name, in which the compiled product was measured to be the fastest on "a GPU"."""
    modules = {
        name.rpartition(".")[2]: compiled.kernel_module(compiled.PACKAGE, name)
        for name in ("gpu.launch_cache", "gpu.symmetric_gemm", "gpu.tuned", "native")
    }
    operation = Operation()
    monkeypatch.setattr(modules["native"], "hopper_gemm_", operation, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(modules["launch_cache"], "_STARTS", {})
    fastest = {"entry": modules["tuned"].HOPPER._asdict()}
    monkeypatch.setattr(modules["tuned"], "nearest", lambda *asked, **kernel: fastest["entry"])
    return {**modules, "calls": operation.calls, "fastest": fastest}


def square(m: int = 512, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(2, m, m, dtype=dtype)


@pytest.mark.parametrize("number", range(3))
def test_it_is_launched_where_it_was_measured_to_be_fastest(package, number):
    A, C, config = square(), square(), package["tuned"].COMPILED[number]
    package["fastest"]["entry"] = config._asdict()
    with compiled.absent_gpu("sm_90", compiled.PACKAGE):
        assert package["symmetric_gemm"].chosen_for(A, A, A, C) == config
        for alpha in (2.0, 3.0):  # the second one is prepared
            package["launch_cache"].launch(A, A, A, C, alpha, 0.5, 0.25)
            package["launch_cache"].launch(A, A, None, C, alpha, 0.5, 0.25)
    options = [(call[3] is not None, *call[4:]) for call in package["calls"]]
    assert options == [(D, alpha, 0.5, 0.25, config.sections) for alpha in (2.0, 3.0) for D in (True, False)]
    assert all(call[0] is C and call[1] is A for call in package["calls"]) and len(package["launch_cache"]._STARTS) == 2


@pytest.mark.parametrize("gpu", ["sm_80", "sm_100", "sm_120", "gfx942"])
def test_other_gpus_never_launch_it(package, gpu):
    A = square()
    with compiled.absent_gpu(gpu, compiled.PACKAGE):
        target = package["tuned"].target_of(torch.device("cuda"))
        chosen = package["symmetric_gemm"].chosen_for(A, A, None, square())
    safe = {package["tuned"].safe_config(target, HALF, 512, descriptors, True) for descriptors in (True, False)}
    assert chosen in safe


@pytest.mark.parametrize("layout", ["expanded", "misaligned", "spread", "rows of columns", "of 4"])
def test_operands_that_do_not_fit_go_to_triton(package, layout):
    A = B = square()
    if layout == "expanded":
        A = A[:1].expand(2, 512, 512)
    elif layout == "misaligned":
        A = torch.zeros(2 * 512 * 512 + 1, dtype=HALF)[1:].view(2, 512, 512)
    elif layout == "spread":
        A = torch.zeros(2, 512, 1024, dtype=HALF)[:, :, ::2]
    elif layout == "rows of columns":
        A, B = square().mT, square().mT
    else:
        A = B = square(516)
    C = square(A.size(1))
    with compiled.absent_gpu("sm_90", compiled.PACKAGE):
        for config in package["tuned"].COMPILED:
            package["fastest"]["entry"] = config._asdict()
            assert package["symmetric_gemm"].chosen_for(A, B, None, C) not in package["tuned"].COMPILED
        fits = package["symmetric_gemm"].hopper_gemm.fits
        assert not fits(A, B, None, C) and fits(C.mT, C, None, C) == (C.size(1) % 8 == 0)


def test_an_addend_that_does_not_fit_goes_to_triton(package):
    """As do rows that are no multiple of 8, though their strides are."""
    A, D = square(), torch.zeros(2 * 512 * 512 + 1, dtype=HALF)[1:].view(2, 512, 512)
    padded = torch.zeros(2, 516, 520, dtype=HALF)[:, :, :516]
    with compiled.absent_gpu("sm_90", compiled.PACKAGE):
        assert package["symmetric_gemm"].chosen_for(A, A, A, square()) in package["tuned"].COMPILED
        for operands in (A, A, D, square()), (padded, padded, None, padded):
            assert package["symmetric_gemm"].chosen_for(*operands) not in package["tuned"].COMPILED
            assert not package["symmetric_gemm"].hopper_gemm.fits(*operands)


def test_a_build_without_it_never_launches_it(package, monkeypatch):
    monkeypatch.setattr(package["symmetric_gemm"].hopper_gemm, "is_built", lambda: False)
    with compiled.absent_gpu("sm_90", compiled.PACKAGE):
        assert package["symmetric_gemm"].chosen_for(square(), square(), None, square()) not in package["tuned"].COMPILED


def test_without_a_measurement_it_is_never_chosen(package, monkeypatch):
    monkeypatch.setattr(package["tuned"], "nearest", lambda *asked, **kernel: None)
    with compiled.absent_gpu("sm_90", compiled.PACKAGE):
        for m in (16, 64, 512, 4096):
            A = torch.empty(1, m, m, dtype=HALF)
            assert package["symmetric_gemm"].chosen_for(A, A, None, A) not in package["tuned"].COMPILED


@pytest.mark.parametrize("gpu, dtype, competes", [
    ("sm_90", HALF, True), ("sm_90", torch.bfloat16, True), ("sm_90", torch.float32, False), ("sm_100", HALF, False),
])  # fmt: skip
def test_it_competes_on_its_gpu_alone(kernel, monkeypatch, gpu, dtype, competes):
    candidates, tuned = kernel.tuning.candidates, kernel.kernels.gpu.tuned
    monkeypatch.setattr(candidates, "target_of", lambda device: tuned.Target("cuda", int(gpu.removeprefix("sm_"))))
    configs = candidates.product_configs(torch.device("cpu"), dtype, (2048, 2048))
    assert [config in configs for config in tuned.COMPILED] == [competes] * len(tuned.COMPILED)
    assert configs[0] not in tuned.COMPILED
    assert (configs[1:4] == [*tuned.COMPILED]) == competes


@pytest.mark.parametrize("fastest", ["whole", "sections", "Triton"])
def test_the_choice_of_products_says_that_it_runs(kernel, monkeypatch, fastest):
    """In the name that `explain()` prints."""
    products, tuned = kernel.kernels.products, kernel.kernels.gpu.tuned
    whole, sections, _ = tuned.COMPILED
    entry = {"whole": whole, "sections": sections, "Triton": tuned.Config(128, 64, 8, 8, 3)}[fastest]._asdict()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    known = kernel.kernels.speeds.measurements.Known
    sizes = [known({"m": 2048, "k": k, **entry}, "measured here") for k in (2048, 4096)]
    monkeypatch.setattr(kernel.kernels.speeds.gains, "sizes_here", lambda *asked: sizes)
    monkeypatch.setattr(
        products, "symmetric_choice", lambda *asked: kernel.kernels.speeds.gains.Gain(1.5, "measured here")
    )
    table = products.select_products(torch.device("cuda", 0), HALF, 2048, 4096)
    assert table.name == ("symmetric_gemm" if fastest == "Triton" else "hopper_gemm") + " + torch.bmm"
    assert table.source == "measured here"


def test_a_cpu_has_no_such_product(kernel):
    """And nothing stands in for it: it is asked for by name, or chosen where it was measured."""
    A = torch.zeros(1, 16, 16, dtype=HALF)
    with pytest.raises(NotImplementedError, match="hopper_gemm_"):
        kernel.kernels.gpu.hopper_gemm.hopper_product(A, A.mT)


def test_it_is_traced_without_a_gpu(kernel):
    with FakeTensorMode():
        A = torch.empty(3, 64, 32, dtype=HALF, device="cuda")
        C = kernel.kernels.gpu.hopper_gemm.hopper_product(A, A.mT)
    assert (C.shape, C.device.type) == ((3, 64, 64), "cuda")


def test_no_more_launches_are_remembered_than_there_may_be(package, monkeypatch):
    """Of a program whose shapes keep changing."""
    cache, remembered = package["launch_cache"], []
    monkeypatch.setattr(cache, "MAX_STARTS", 2)
    with compiled.absent_gpu("sm_90", compiled.PACKAGE):
        for m in (256, 512, 768, 1024):
            cache.launch(square(m), square(m), None, square(m), 1.0, 0.0, 0.0)
            remembered.append(len(cache._STARTS))
    assert remembered == [1, 2, 1, 2] and len(package["calls"]) == 4
