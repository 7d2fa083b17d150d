"""The launches that are compiled: every layout and size that changes the compiled code.

A launch is given by its operands; with a configuration it is a case: the one that the package chooses for them, or one
that competes with it, which may spill registers: a contest shows what that costs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Union

import torch

from tools.lint.compiled import GPUS, absent_gpu, compile_launch, kernel_module, takes_descriptors
from tools.lint.layouts import LAYOUTS, SQUARE, new_of

# (m, k): side above and below all limits for small tiles; a multiple of nothing; of 16 bytes, not of 16 elements.
LARGE, SMALL, ODD, EIGHTS = (2048, 4096), (256, 1024), (2047, 4095), (1000, 2000)

# Of larger squares programs compute so many rows, as in the package's kernel.
LARGEST_TILE = 128


class Case(NamedTuple):
    """One launch of `symmetric_gemm`: operands laid out as `LAYOUTS[layout]` says, with a configuration."""

    gpu: str
    layout: str
    dtype: str
    m: int
    k: int
    config: tuple
    competes: bool = False

    @property
    def name(self) -> str:
        size = f"{self.m}" if self.layout in SQUARE else f"{self.m} x {self.k}"
        return f"{self.dtype} {self.layout} {size}"

    kernel = "symmetric_gemm"

    @property
    def parts(self) -> tuple[int, int, int]:
        """Rows and columns of the result of a matrix product in its loop, and the length of its sums."""
        return min(self.config[0], LARGEST_TILE), self.config[0], self.config[1]

    @property
    def products(self) -> tuple[int, int]:
        """The smallest and the largest number of such products in the code's loops."""
        return 1, 1

    def compile(self, package: Path) -> Any:
        numbers = 1.5, -0.5, 0.25
        return compile_launch(
            self.gpu, package, self.kernel, lambda module: (*operands(self), numbers, module.Config(*self.config))
        )

    def takes_descriptors(self, package: Path) -> bool:
        """Whether both operands of the product come through tensor descriptors."""
        A, B, _, _ = operands(self)
        return takes_descriptors(self.gpu, package, (A, B.mT))

    def promises_speed(self, package: Path) -> bool:
        """Whether `judgements.drawbacks` knows its main loop: operands are aligned and have 16 bits, on sm_90."""
        if self.gpu != "sm_90" or self.dtype == "float32" or not self.takes_descriptors(package):
            return False
        present = (operand for operand in operands(self) if operand is not None)
        return kernel_module(package, "gpu.symmetric_gemm").is_aligned(*present)


class SmallPolarCase(NamedTuple):
    """One launch of `small_polar` in `dtype`: with aligned operands of that dtype, or with unaligned float32 ones."""

    gpu: str
    aligned: bool
    dtype: str
    m: int
    config: tuple
    competes: bool = False

    @property
    def name(self) -> str:
        return f"{self.dtype} small polar {self.m} " + ("aligned" if self.aligned else "ragged, tall, of float32")

    kernel = "small_polar"

    @property
    def on_chip(self) -> bool:
        return bool(self.config[5])

    @property
    def parts(self) -> tuple[int, int, int]:
        """As in `Case`, for a panel."""
        return self.config[:3]

    @property
    def products(self) -> tuple[int, int]:
        """X Xᵀ, R R, H Q, H R, Q X and the last Q X; pipelining may move one copy of each to the outer loop.

        On the chip X Xᵀ takes all columns at once, Q X the whole depth, and the others, of which H (H R) is two, both.
        """
        side, width, depth = self.parts
        if not self.on_chip:
            return 6, 12
        panels = side // width + 2 * (side // depth)
        squares = 4 * (side // width) * (side // depth)
        return squares + panels, squares + 2 * panels

    def compile(self, package: Path) -> Any:
        m, n = (self.m, 4 * self.m) if self.aligned else (self.m - 3, 4 * self.m - 1)
        new = new_of(self.dtype if self.aligned else "float32")
        G, C = (new(2, m, n) if self.aligned else new(2, n, m).mT for _ in "GC")
        steps, scaling = 5 * (1.5, -0.5, 0.25, 1.0), (8.0, 1e-7, getattr(torch, self.dtype))
        return compile_launch(
            self.gpu, package, self.kernel, lambda module: (G, C, steps, scaling, module.SmallConfig(*self.config))
        )

    def takes_descriptors(self, package: Path) -> bool:
        return False

    def promises_speed(self, package: Path) -> bool:
        return False


AnyCase = Union[Case, SmallPolarCase]


def operands(case: Case) -> tuple:
    """Return A, B, D, C of a case, without contents. Nothing is written to them, so they take no memory."""
    return LAYOUTS[case.layout](new_of(case.dtype), case.m, case.k)


def all_cases(package: Path) -> list[AnyCase]:
    """Return every launch to compile for every GPU, those with the package's measured configurations at the end."""
    cases = [case for gpu in GPUS for case in _chosen(package, gpu, _regimes(takes_descriptors(gpu, package)))]
    cases += [case for gpu in GPUS for case in _usual(package, gpu)]
    small = (case for gpu in GPUS for case in _small_polar(package, gpu, ("float16", "bfloat16", "float32")))
    return list(dict.fromkeys([*cases, *small, *_measured(package)]))


def fast_cases(package: Path) -> list[AnyCase]:
    """Return a few launches for each of three NVIDIA generations: both tile sizes, and the worst alignment."""
    regimes = [("wide", "bfloat16", *LARGE), *(("square", "bfloat16", *size) for size in (SMALL, ODD, EIGHTS))]
    gpus = "sm_80", "sm_90", "sm_100"
    chosen = [case for gpu in gpus for case in _chosen(package, gpu, regimes)]
    small = [case for gpu in gpus for case in _small_polar(package, gpu, ["float16"])]
    small = [case for case in small if case.m == 64 + 64 * case.aligned and (case.on_chip or not case.competes)]
    return [*chosen, *next(zip(*(_usual(package, gpu) for gpu in gpus))), *small]


def _regimes(descriptors: bool) -> Iterator[tuple]:
    """Yield (layout, dtype, m, k): all for bfloat16, then what differs for other dtypes."""
    half, full = "bfloat16", "float32"
    eights = (EIGHTS,) if descriptors else ()  # for pointers they are no different from odd sizes
    for size in (LARGE, SMALL, ODD, *eights):
        yield from ((layout, half, *size) for layout in ("wide", "tall", "square"))
    if descriptors:
        yield from ((layout, half, *size) for layout in ("repeated", "repeated_square") for size in (LARGE, SMALL))
        yield from ((layout, full, *LARGE) for layout in ("repeated", "repeated_square"))
    yield from ((layout, half, *LARGE) for layout in ("shifted_addend", "spread"))
    yield from (("transposed_result", half, *size) for size in (LARGE, SMALL, ODD))
    yield from (("square", "float16", *size) for size in (LARGE, SMALL, ODD))
    for size in (LARGE, ODD, *eights):
        yield from ((layout, full, *size) for layout in ("wide", "tall", "square"))


def _chosen(package: Path, gpu: str, regimes) -> Iterator[Case]:
    """Yield the regimes with the configuration that the package chooses on a GPU without measurements."""
    module = kernel_module(package, "gpu.symmetric_gemm")
    with absent_gpu(gpu, package):
        for regime in regimes:
            case = Case(gpu, *regime, config=())
            yield case._replace(config=tuple(module.config_for("", _target(module, gpu), operands(case))))


def _usual(package: Path, gpu: str) -> Iterator[Case]:
    """Yield the configurations that compete with the chosen one, two tiles first, with the operands of a step."""
    tuned = kernel_module(package, "gpu.tuned")
    for config in tuned.usual_configs(_target(tuned, gpu), torch.bfloat16):
        if config in tuned.COMPILED:  # not compiled by Triton; tools/lint/hopper.py reads its machine code
            continue
        for layout in ("wide", "tall", "square", "commuting"):
            yield Case(gpu, layout, "bfloat16", *LARGE, tuple(config), competes=True)


def _small_polar(package: Path, gpu: str, dtypes) -> Iterator[SmallPolarCase]:
    """Yield the safe configuration of each side. In float16, for both halves, also yield those that compete with it."""
    tuned = kernel_module(package, "gpu.tuned")
    target = _target(tuned, gpu)
    for name, side in itertools.product(dtypes, tuned.PADDED_SIDES):
        dtype = getattr(torch, name)
        safe = tuned.safe_small_config(target, dtype, side)
        usual = tuned.usual_small_configs(target, dtype, side) if name != "bfloat16" else []
        configs = dict.fromkeys([safe, *usual])
        for config, aligned in itertools.product(configs, (True, False)):
            yield SmallPolarCase(gpu, aligned, name, side, tuple(config), competes=config != safe)


def _measured(package: Path) -> Iterator[AnyCase]:
    """Yield each entry of configs/*.json, with all operands for which a look-up takes it: aligned ones for products."""
    tuned = kernel_module(package, "gpu.tuned")
    for file in sorted((package / "kernels/speeds/configs").glob("*.json")):
        content = json.loads(file.read_text())
        if content.get("target") not in GPUS:
            raise ValueError(f"{file.name} must say its target, one of {', '.join(GPUS)}, got {content.get('target')}")
        gpu = content["target"]
        for dtype, config in _configs(content.get("symmetric_gemm", {}), tuned.Config):
            if config in tuned.COMPILED:  # not compiled by Triton; tools/lint/hopper.py reads its machine code
                continue
            for layout in ("wide", "tall", "square", "repeated", "repeated_square", "transposed_result"):
                yield Case(gpu, layout, dtype, *LARGE, config)
        for dtype, config in _configs(content.get("small_polar", {}), tuned.SmallConfig):
            yield from (SmallPolarCase(gpu, aligned, dtype, config[0], config) for aligned in (True, False))


def _configs(table: dict[str, list[dict]], kind: type) -> dict[tuple[str, tuple], None]:
    """Return the distinct configurations of a kernel's entries, each with its dtype."""
    pairs = ((dtype, entry) for dtype, entries in table.items() for entry in entries)
    return dict.fromkeys((dtype, tuple(entry[field] for field in kind._fields)) for dtype, entry in pairs)


def _target(module: ModuleType, gpu: str):
    known = GPUS[gpu]
    return module.Target("hip", 0) if known.backend == "hip" else module.Target("cuda", known.arch)
