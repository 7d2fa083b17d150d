"""Which launches of the symmetric product are compiled: each layout and size that changes what is compiled.

A launch is given by its operands; the package's own choice among its configurations makes it a case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from kernel_compile import GPUS, absent_gpu, kernel_module, takes_descriptors

# (m, k): side above and below the package's limit for small tiles; a multiple of nothing; of 16 bytes, not 16 elements.
LARGE, SMALL, ODD, EIGHTS = (2048, 4096), (512, 1024), (2047, 4095), (1000, 2000)


class Case(NamedTuple):
    """One launch to compile: operands laid out as `LAYOUTS[layout]` says, with a configuration."""

    gpu: str
    layout: str
    dtype: str
    m: int
    k: int
    scalars_on_device: bool
    config: tuple

    @property
    def name(self) -> str:
        size = f"{self.m}" if self.layout in SQUARE else f"{self.m} x {self.k}"
        return f"{self.dtype} {self.layout} {size}" + (", scalars on device" if self.scalars_on_device else "")


def wide(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    X = new(2, m, k)
    return X, X.mT, None, new(2, m, m)


def tall(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    X = new(2, k, m).mT
    return X, X.mT, None, new(2, m, m)


def square(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    return new(2, m, m), new(2, m, m), new(2, m, m), new(2, m, m)


def repeated(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    """One matrix for the whole batch, which a tensor descriptor cannot say: pointers on every GPU."""
    X = new(m, k).expand(2, m, k)
    return X, X.mT, None, new(2, m, m)


def repeated_square(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    R = new(m, m).expand(2, m, m)
    return R, R, R, new(2, m, m)


def shifted_addend(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    return new(2, m, m), new(2, m, m), new(2, m, m + 1)[..., 1:], new(2, m, m)


def transposed_result(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    return new(2, m, m), new(2, m, m), new(2, m, m).mT, new(2, m, m).mT


def spread(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    """No inner stride is 1, as in a sliced result and operand."""
    X = new(2, m, 16 * k)[..., ::16]
    return X, X.mT, None, new(2, m, 16 * m)[..., ::16]


SQUARE = {f.__name__: f for f in (square, repeated_square, shifted_addend, transposed_result)}
LAYOUTS = {f.__name__: f for f in (wide, tall, repeated, spread)} | SQUARE


def operands(case: Case) -> tuple:
    """Return A, B, D, C of a case, without contents; nothing is written, so that no memory is taken."""
    return LAYOUTS[case.layout](_empty(case.dtype), case.m, case.k)


def all_cases(package: Path) -> list[Case]:
    """Return every launch to compile for every GPU, those with the package's measured configurations at the end."""
    cases = [case for gpu in GPUS for case in _chosen(package, gpu, _regimes(takes_descriptors(gpu, package)))]
    return list(dict.fromkeys([*cases, *_measured(package)]))


def fast_cases(package: Path) -> list[Case]:
    """Return a few launches for each of three NVIDIA generations: both sizes of tiles, and the worst alignment."""
    regimes = [("wide", "bfloat16", *LARGE, False), ("square", "bfloat16", *SMALL, True)]
    regimes += [("square", "bfloat16", *ODD, False), ("square", "bfloat16", *EIGHTS, False)]
    return [case for gpu in ("sm_80", "sm_90", "sm_100") for case in _chosen(package, gpu, regimes)]


def _regimes(descriptors: bool) -> Iterator[tuple]:
    """(layout, dtype, m, k, scalars on the device): all of bfloat16, then what other dtypes compile differently."""
    half, full = "bfloat16", "float32"
    eights = (EIGHTS,) if descriptors else ()  # pointers take them for odd
    for size in (LARGE, SMALL, ODD, *eights):
        yield from ((layout, half, *size, False) for layout in ("wide", "tall", "square"))
    if descriptors:
        yield from (
            (layout, half, *size, False) for layout in ("repeated", "repeated_square") for size in (LARGE, SMALL)
        )
        yield from ((layout, full, *LARGE, False) for layout in ("repeated", "repeated_square"))
    yield from (("square", half, *size, True) for size in (LARGE, ODD))
    yield from (("wide", half, *LARGE, True), ("shifted_addend", half, *LARGE, False), ("spread", half, *LARGE, False))
    yield from (("transposed_result", half, *size, False) for size in (LARGE, SMALL, ODD))
    yield from (("square", "float16", *size, False) for size in (LARGE, SMALL, ODD))
    for size in (LARGE, ODD, *eights):
        yield from ((layout, full, *size, False) for layout in ("wide", "tall", "square"))


def _chosen(package: Path, gpu: str, regimes) -> Iterator[Case]:
    """The regimes with the configuration that the package chooses on a GPU of which nothing was measured."""
    module = kernel_module(package, "symmetric_gemm")
    with absent_gpu(gpu, module):
        for regime in regimes:
            case = Case(gpu, *regime, config=())
            yield case._replace(config=tuple(module.config_for("", _target(module, gpu), *operands(case))))


def _measured(package: Path) -> Iterator[Case]:
    """Each entry of configs/*.json, for all aligned operands, because a lookup asks no more of them."""
    module = kernel_module(package, "symmetric_gemm")
    for file in sorted((package / "kernels/configs").glob("*.json")):
        content = json.loads(file.read_text())
        if content.get("target") not in GPUS:
            raise ValueError(f"{file.name} must say its target, one of {', '.join(GPUS)}, got {content.get('target')}")
        for dtype, entries in content["symmetric_gemm"].items():
            configs = dict.fromkeys(tuple(entry[field] for field in module.Config._fields) for entry in entries)
            for layout in ("wide", "tall", "square", "repeated", "repeated_square", "transposed_result"):
                yield from (Case(content["target"], layout, dtype, *LARGE, False, config) for config in configs)


def _target(module: ModuleType, gpu: str):
    known = GPUS[gpu]
    return module.Target("hip", 0) if known.backend == "hip" else module.Target("cuda", known.arch)


def _empty(dtype: str) -> Callable[..., Tensor]:
    return lambda *shape: torch.empty(*shape, dtype=getattr(torch, dtype))
