"""Prepared launches: a second launch on operands that lie alike starts what Triton's own first one started.

No GPU is needed: Triton compiles for one that is not there, and in the place of its launcher stands one that writes
down what it is to start.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from tools.lint import cases, compiled

ABC = 1.5, -0.5, 0.25


class Started:
    """Stands for Triton's launcher of one compiled kernel; `log` has what all of them were to start."""

    log: ClassVar[list[tuple]] = []

    def __init__(self, source, metadata):
        self.kernel = source.hash(), metadata.num_warps, metadata.num_stages

    def __call__(self, *arguments):
        """Take what Triton's launchers do: three sizes of the grid, a stream, five that are the kernel's, arguments."""
        self.log.append((self.kernel, arguments[:3], arguments[3], tuple(map(shown, arguments[9:]))))


class Driver(compiled.AbsentGPU):
    """A GPU that is not there, on which launches are written down."""

    launcher_cls = Started
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *binary: (1, 1, 100, 0, 1024),
    )

    def get_current_stream(self, device: int) -> int:
        return 10 + device


def shown(argument):
    """Return an argument as values that can be compared: a tensor as its address, a descriptor by what it describes."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if hasattr(argument, "base"):
        return argument.base.data_ptr(), list(argument.shape), list(argument.strides), argument.padding
    return argument


@pytest.fixture(params=["sm_80", "sm_90"])
def launch_cache(request, monkeypatch):
    """The module of cached launches, on a GPU that is not there and on which nothing was launched yet."""
    module = compiled.kernel_module(compiled.PACKAGE, "gpu.launch_cache")
    monkeypatch.setattr(compiled, "AbsentGPU", Driver)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with compiled.absent_gpu(request.param, compiled.PACKAGE):
        monkeypatch.setattr(module, "_STARTS", {})
        monkeypatch.setattr(Tensor, "get_device", lambda tensor: module.driver.active.number)
        Started.log.clear()
        yield module


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("size", [(64, 128), (33, 65)], ids=str)
def test_cached_launch_starts_what_triton_starts(launch_cache, layout, size):
    """With other operands that lie alike: its grid, its kernel, its stream, and each argument in its place."""

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32)  # for which kernels are compiled soonest

    first, second = (cases.LAYOUTS[layout](new, *size) for _ in range(2))
    launch_cache.launch(*first, *ABC)
    launch_cache.launch(*second, *ABC)
    config = launch_cache.chosen_for(*second)
    launch_cache.launch_symmetric_gemm(*second, ABC, config)
    of_first, ours, tritons = Started.log
    assert ours == tritons
    assert ours[3] != of_first[3]  # or the addresses of the first were kept


def test_misaligned_operands_get_a_kernel_of_their_own(launch_cache):
    """Loads of 16 bytes from other addresses would be fatal, and all else about these operands is equal."""
    memory = torch.empty(2 * 64 * 64 + 1)
    C = torch.empty(1, 64, 64)
    aligned, shifted = memory[: 64 * 64].view(1, 64, 64), memory[64 * 64 + 1 :].view(1, 64, 64)
    for A in (aligned, shifted, aligned, shifted):
        launch_cache.launch(A, A.mT, None, C, *ABC)
    kernels = [kernel for kernel, *_ in Started.log]
    assert kernels[0] == kernels[2] != kernels[1] == kernels[3]


def test_addend_shape_and_batch_are_told_apart(launch_cache):
    X, R, C = torch.empty(2, 64, 128), torch.empty(2, 64, 64), torch.empty(2, 64, 64)
    calls = [(X, X.mT, None, C), (R, R.mT, None, C), (R, R.mT, R, C), (X[:1], X[:1].mT, None, C[:1])]
    for _ in range(2):
        for operands in calls:
            launch_cache.launch(*operands, *ABC)
    assert Started.log[:4] == Started.log[4:]
    assert len({(kernel, grid, str(arguments)) for kernel, grid, _, arguments in Started.log}) == len(calls)


def test_all_that_a_kernel_is_compiled_for_is_told_apart(launch_cache):
    """And nothing else: operands that lie alike in other memory start the same kernel."""

    def new() -> Tensor:
        return torch.empty(2, 64, 64)

    # 8 bytes behind an address that divides by 16.
    unaligned = torch.empty(2 * 64 * 64 + 2)[2:].view(2, 64, 64)

    def geometries() -> list:
        A, B, D, C = new(), new(), new(), new()
        transposed = A.mT
        cases = [(A, None, C), (A, None, C.mT), (A, None, unaligned), (A.bfloat16(), None, C.bfloat16())]
        cases += [(A, D, C), (A, unaligned, C), (A.mT, None, C), (unaligned, None, C)]
        cases += [(unaligned, D, C), (unaligned, unaligned, C)]
        of_two = [(A, B, None), (A.mT, B.mT, None), (A, unaligned, None), (A, transposed, transposed)]
        return [launch_cache._geometry(A, A.mT, D, C) for A, D, C in cases] + [
            launch_cache._geometry(A, B, D, C)
            for A, B, D in of_two  # others lie as A and A.mT do
        ]

    keys = geometries()
    assert len(set(keys)) == len(keys) and geometries() == keys


def test_measurements_count_from_the_next_launch_on(launch_cache, monkeypatch):
    X, C = torch.empty(1, 64, 64), torch.empty(1, 64, 64)
    config = launch_cache.chosen_for(X, X.mT, None, C)
    launch_cache.launch(X, X.mT, None, C, *ABC)
    monkeypatch.setattr(launch_cache, "chosen_for", lambda *operands: config._replace(warps=8))
    launch_cache.launch(X, X.mT, None, C, *ABC)
    monkeypatch.setattr(launch_cache, "changed", lambda: -1)
    launch_cache.launch(X, X.mT, None, C, *ABC)
    assert [kernel[1] for kernel, *_ in Started.log] == [config.warps, config.warps, 8]


def test_ranks_launch_what_they_have_agreed_on(launch_cache, monkeypatch):
    """Others share a matrix of the same size, and must go on launching what all of them would."""
    X, C = torch.empty(1, 64, 64), torch.empty(1, 64, 64)
    safe = launch_cache.chosen_for(X, X.mT, None, C)
    agreed = safe._replace(warps=8)
    assert agreed != safe
    monkeypatch.setattr(launch_cache, "chosen_for", lambda *operands: agreed if operands[-1] == (0, 1) else safe)
    for among in ((), (0, 1), None, (0, 1)):
        launch_cache.launch(X, X.mT, None, C, *ABC, among)
    assert [kernel[1] for kernel, *_ in Started.log] == [safe.warps, 8, safe.warps, 8]


def test_few_launches_are_remembered(launch_cache, monkeypatch):
    """However often the shapes of a program change; of one that stays nothing is worked out again."""
    monkeypatch.setattr(launch_cache, "MAX_STARTS", 2)
    X, C = torch.empty(5, 64, 64), torch.empty(5, 64, 64)
    for count in (1, 2, 3, 4, 5):
        launch_cache.launch(X[:count], X[:count].mT, None, C[:count], *ABC)
        assert 1 <= len(launch_cache._STARTS) <= 2
    monkeypatch.setattr(launch_cache, "chosen_for", None)
    launch_cache.launch(X, X.mT, None, C, *ABC)


def test_empty_operands_launch_nothing(launch_cache):
    for shape in ((0, 64, 64), (2, 0, 64)):
        X = torch.empty(shape)
        launch_cache.launch(X, X.mT, None, torch.empty(*shape[:2], shape[1]), *ABC)
    assert not Started.log


def test_products_elsewhere_go_the_way_of_the_op(kernel):
    """On a CPU, where it is known what they give, and where tracers have made their operands up."""
    product = kernel.kernels.gpu.launch_cache.symmetric_product
    X = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    R, out = torch.ones(2, 5, 5), torch.empty(2, 5, 5)
    expected = 1.5 * torch.bmm(X, X.mT) - 0.5 * R + 0.25 * torch.eye(5)
    alpha, beta, diagonal = ABC
    # 25 sums of numbers about 1
    torch.testing.assert_close(product(X, X.mT, R, alpha, beta, out, diagonal), expected, atol=1e-5, rtol=0)
    assert product(X, X.mT, R, alpha, beta, out, diagonal) is out
    traced = torch.compile(lambda X: product(X, X.mT), backend="eager", fullgraph=True)
    assert torch.equal(traced(X), product(X, X.mT))
    with mock.patch.object(
        kernel.kernels.gpu.launch_cache, "launch", side_effect=AssertionError("nothing is launched")
    ):
        fake = torch._subclasses.FakeTensorMode()
        with fake:
            A, B = torch.empty(2, 5, 7, device="cuda"), torch.empty(2, 7, 5, device="cuda")
            assert product(A, B).shape == (2, 5, 5)
        assert product(A, B).shape == (2, 5, 5)


@pytest.mark.parametrize("recorded", ["by a mode", "by torch.compile"])
def test_products_whose_operations_are_recorded_launch_nothing(kernel, monkeypatch, recorded):
    """On a GPU, too, as a launch below the op would not be recorded."""
    cache, launched, X = kernel.kernels.gpu.launch_cache, [], torch.ones(2, 5, 7)
    monkeypatch.setattr(cache, "launch", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(cache, "symmetric_gemm", lambda *arguments: "the op")
    for name, answer in ("is_cuda", True), ("get_device", lambda tensor: 0):
        monkeypatch.setattr(Tensor, name, answer, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    operands = X, X.mT
    assert cache.symmetric_product(*operands) != "the op" and len(launched) == 1
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: recorded == "by torch.compile")
    with torch._subclasses.FakeTensorMode() if recorded == "by a mode" else nullcontext():
        assert cache.symmetric_product(*operands) == "the op"
    assert len(launched) == 1


class Placed:
    """A tensor that says it is on a GPU of this number."""

    def __init__(self, tensor: Tensor, number: int):
        self.tensor, self.number = tensor, number

    def __getattr__(self, name: str):
        return getattr(self.tensor, name)

    def get_device(self) -> int:
        return self.number


def test_each_gpu_has_a_kernel_of_its_own(kernel):
    """What is loaded onto one cannot be started on another."""
    X, geometry = torch.empty(1, 64, 64), kernel.kernels.gpu.launch_cache._geometry
    first, second = ([Placed(X, number) for _ in range(3)] for number in range(2))
    keys = [geometry(A, B, None, C) for A, B, C in (first, second, second)]
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize("current", [0, 1])
def test_a_product_is_launched_on_the_gpu_of_its_operands(kernel, monkeypatch, current):
    """As its ranks have agreed, and into the tensor that is given."""
    cache, launched, entered = kernel.kernels.gpu.launch_cache, [], []
    monkeypatch.setattr(cache, "can_launch_on", lambda A: True)
    monkeypatch.setattr(cache, "launch", lambda *arguments: launched.append((len(entered), *arguments)))
    monkeypatch.setattr(Tensor, "get_device", lambda self: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    X, out = torch.empty(2, 5, 7), torch.empty(2, 5, 5)
    assert cache.symmetric_product(X, X.mT, None, *ABC[:2], out, ABC[2], among=(0, 3)) is out
    assert cache.symmetric_product(X, X.mT).shape == out.shape
    ((inside, *arguments), _) = launched
    assert inside == len(entered) // 2 == (current != 1) and {*entered} <= {X.device}
    assert arguments[3] is out and arguments[4:] == [*ABC, (0, 3)]
