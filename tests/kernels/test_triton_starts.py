"""Starts below Triton's launcher: the driver gets what it gets from the launcher itself.

No GPU is needed: Triton compiles for one that is not there, its launcher runs as it is, and in the place of the driver
stands one that keeps what it is to launch.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.stubbed_driver import stubbed_gpu
from tools.lint import cases, compiled

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, as Triton does"),
    # A process has one driver: Triton would launch on that of the GPU here, and later tests on the stub.
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a process that has no driver"),
]

ABC = 1.5, -0.5, 0.25


def unlike(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    """Operands whose descriptors have other sizes and strides, as no step's have."""
    return new(2, m, k), new(2, k, m + 16)[..., :m], None, new(2, m, m)


LAYOUTS = {**cases.LAYOUTS, "unlike": unlike}
SIZES = {"i32": 4, "fp32": 4, "i64": 8}
DESCRIPTOR = [128, 4, 4, 4, 8, 8, 8]  # a tensor map, then shape and strides of three dimensions
BYTES_OF_FACTS, SCRATCHES = 10 * 8, [8, 8]


class Kept:
    """What the driver gets of a launch of one kernel: grid, block, stream, number of attributes, every parameter."""

    def __init__(self, driver: ctypes.CDLL, kernel):
        sizes = [size for kind in kernel.src.signature.values() for size in sizes_of(kind)] + SCRATCHES
        self._sizes = (ctypes.c_long * (len(sizes) + 1))(*sizes, 0)
        self._bytes = ctypes.create_string_buffer(BYTES_OF_FACTS + sum(sizes))
        driver.keep_launches(self._bytes, self._sizes)

    def of(self, launch, *arguments) -> bytes:
        """Return what the driver gets when `launch` is called."""
        ctypes.memset(self._bytes, 0xFF, len(self._bytes))
        launch(*arguments)
        return self._bytes.raw


def sizes_of(kind: str) -> list[int]:
    if kind == "constexpr":
        return []
    return DESCRIPTOR if kind.startswith("tensordesc") else [8 if kind.startswith("*") else SIZES[kind]]


@pytest.fixture(params=["sm_80", "sm_90"])
def driver(request, monkeypatch) -> Iterator[ctypes.CDLL]:
    monkeypatch.setattr(compiled.AbsentGPU, "get_current_stream", lambda gpu, device: 7)
    with stubbed_gpu(request.param, compiled.PACKAGE) as driver:
        yield driver
        driver.keep_launches(None, None)


@pytest.fixture
def launch_cache():
    return compiled.kernel_module(compiled.PACKAGE, "gpu.launch_cache")


def new(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float16)


def launched_by_triton(launch_cache, operands: tuple):
    return launch_cache.launch_symmetric_gemm(*operands, ABC, launch_cache.chosen_for(*operands))


def arranged(launch_cache, operands: tuple):
    return launch_cache.arrange(*operands, launch_cache.chosen_for(*operands))


def start_of(launch_cache, operands: tuple):
    """Return the kernel, and what starts it for operands laid out like these, as a function of operands."""
    kernel = launched_by_triton(launch_cache, operands)
    start = launch_cache.prepare(*operands[:2], arranged(launch_cache, operands), kernel)
    return kernel, lambda A, B, D, C: start(A, B, C if D is None else D, C, *ABC)


@pytest.mark.parametrize("layout", ["wide", "tall", "square", "commuting", "repeated", "spread", "unlike"])
def test_the_driver_gets_what_it_gets_from_tritons_launcher(driver, launch_cache, layout):
    """With operands at other addresses than those of the first launch, and once more with the same."""
    first, second = (LAYOUTS[layout](new, 64, 128) for _ in range(2))
    kernel, start = start_of(launch_cache, first)
    kept = Kept(driver, kernel)
    for operands in (first, second, second, first):
        expected = kept.of(launched_by_triton, launch_cache, operands)
        assert kept.of(start, *operands) == expected
    assert kept.of(start, *first) != kept.of(start, *second)


def test_it_gets_the_same_where_the_part_below_the_launcher_is_not_known(driver, launch_cache):
    operands = unlike(new, 64, 128)
    starts = compiled.kernel_module(compiled.PACKAGE, "gpu.triton_starts")
    kernel, direct = start_of(launch_cache, operands)
    with mock.patch.object(starts, "_part_in_c", lambda run, panels: None):
        _, whole = start_of(launch_cache, operands)
    kept = Kept(driver, kernel)
    assert kept.of(direct, *operands) == kept.of(whole, *operands)


def test_starts_go_below_the_launcher_of_this_triton(driver, launch_cache):
    """Or they would cost as much as Triton's launcher, which no result would show."""
    starts = compiled.kernel_module(compiled.PACKAGE, "gpu.triton_starts")
    for layout in "wide", "spread":  # by descriptors, where the GPU has them, and by addresses
        operands = LAYOUTS[layout](new, 64, 128)
        kernel, start = start_of(launch_cache, operands)
        with mock.patch.object(type(kernel.run), "__call__", side_effect=AssertionError("the launcher")):
            start(*operands)
        panels = len(arranged(launch_cache, operands).blocks)
        for need in "global_scratch_size", "profile_scratch_size", "gsan_enabled":  # which only the launcher meets
            with mock.patch.object(kernel.run, need, 1, create=True):
                assert starts._part_in_c(kernel.run, panels) is None


class CudaLauncher:
    """Has the name of Triton's, and what it calls with a kernel's arguments."""

    def __init__(self, launch: Callable[..., None]):
        self.launch = launch


def make_tensordesc_arg(panel, meta) -> list:
    """Stands for what makes a descriptor's arguments, which Triton has beside its launcher."""
    return [panel, meta]


def around(launcher: Callable[..., None], tensordesc_meta: list | None) -> Callable[..., None]:
    """Return a function around the part in C, as Triton's launcher calls where operands come by descriptors."""
    return lambda *arguments: launcher(*arguments, tensordesc_meta)


def around_another_name(tensordesc_meta: list) -> Callable[..., None]:
    return lambda *arguments: print(tensordesc_meta)


@pytest.mark.parametrize(
    "launch, panels",
    [
        (lambda *arguments: None, 0),
        (lambda *arguments: None, 2),
        (print, 2),
        (around_another_name(["A", "B"]), 2),
        (around(print, None), 2),
        (around(print, ["A"]), 2),
        (around(print, ["A", None]), 2),
    ],
)
def test_kernels_whose_launcher_is_not_understood_are_started_by_it(launch_cache, launch, panels):
    """Other versions of Triton keep the part below it elsewhere, or make descriptors in another way."""
    starts = compiled.kernel_module(compiled.PACKAGE, "gpu.triton_starts")
    assert starts._part_in_c(CudaLauncher(launch), panels) is None


def test_a_launcher_is_understood_by_what_makes_its_descriptors(launch_cache, monkeypatch):
    """Each operand's are made of what the kernel was compiled for; Triton 3.9 has a third parameter for others."""
    starts = compiled.kernel_module(compiled.PACKAGE, "gpu.triton_starts")
    run, module = CudaLauncher(around(print, ["A", "B"])), sys.modules[__name__]
    for make, more in (make_tensordesc_arg, []), (lambda panel, meta, base: [panel, meta, base], [None]):
        monkeypatch.setattr(module, "make_tensordesc_arg", make)
        below = starts._part_in_c(run, 2)
        assert below.launch is print and [make(1) for make in below.makes] == [[1, "A", *more], [1, "B", *more]]
    monkeypatch.delattr(module, "make_tensordesc_arg")
    assert starts._part_in_c(run, 2) is None


def test_few_descriptors_are_kept(launch_cache):
    """However many buffers a program has, and none is made twice while it is kept."""
    starts, made = compiled.kernel_module(compiled.PACKAGE, "gpu.triton_starts"), []
    kept = starts.Descriptors(lambda panel: made.append(panel.data_ptr()) or [panel.address], [1], [1])
    for address in [*range(1000), *range(900, 1000)]:
        assert kept[address] == (address,)
        assert len(kept) <= starts.MAX_DESCRIPTORS
    assert made == list(range(1000))
