"""Launch configurations of the Triton kernels that are proven and timed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton

from tools.lab.items import Lab, require_triton
from tools.lab.records import FILE, read
from tools.lint.cases import LARGE, AnyCase, Case, SmallPolarCase
from tools.lint.compiled import compile_launch
from tools.lint.kernels import examine_all

STATIC_CHECK = "static check"

PRODUCT, SMALL = "symmetric_gemm", "small_polar"

# How the operands lie of what a contest launches of a product, in its proof and in its race.
RACED = ("wide", "wide_with_addend", "tall", "square", "commuting")

# Of the product: (tile, tile_k, warps, stages). The static check refuses those that do not fit into a GPU. Tiles of 32
# have no wgmma on sm_90, and steps of 32 have twice as many barriers: neither is worth timing.
SHAPES = (
    *((64, tile_k, 4, stages) for tile_k, stages in product((64, 128), (3, 4, 5))),
    *((128, 64, warps, stages) for warps, stages in product((4, 8), (2, 3, 4, 5))),
    *((128, 128, warps, stages) for warps, stages in product((4, 8), (3, 4, 5))),
)
GROUP = 8

# Other orders of the tiles, for the configurations that are most likely to win.
GROUPS = (4, 16)
REGROUPED = ((64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4))

TINY_SHAPES = ((32, 32, 4, 2), (32, 64, 4, 2))

# Of small matrices: (width, depth) and warps, by the padded number of rows.
PANELS = {
    16: (((16, 16),), (1, 2, 4)),
    32: (((32, 32), (16, 32)), (1, 2, 4)),
    64: (((64, 64), (32, 64), (32, 32)), (4, 8)),
    128: (((64, 64), (64, 32), (128, 32), (32, 64)), (8, 16)),
}
SMALL_STAGES = 2
STEPS = 5  # as many as Muon takes by default


class Launch(NamedTuple):
    """A configuration of one kernel in one work dtype."""

    kernel: str
    dtype: torch.dtype
    config: tuple

    @property
    def key(self) -> str:
        """Its name in the static check."""
        return f"{self.kernel} {short(self.dtype)} {'-'.join(map(str, self.config))}"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class RacedSmall(SmallPolarCase):
    """All launches of `small_polar` in a contest. The last is the race's, and it is judged."""

    def compile(self, package: Path) -> Any:
        side, dtype = self.config[0], getattr(torch, self.dtype)
        ragged, whole = (side - 3, 4 * side - 1), (side, 4 * side)
        # The proof also takes each ragged matrix alone, and only the first of them is aligned to 16 bytes. It takes
        # matrices in columns, too, but the race does not.
        for in_columns, ((m, n), first) in product((True, False), ((ragged, 0), (ragged, 1), (whole, 0))):
            drawn = torch.empty((2, n, m) if in_columns else (2, m, n), dtype=torch.float32)[first:]
            G = drawn.mT if in_columns else drawn
            arguments = G, torch.empty_like(G, dtype=dtype), STEPS * (1.5, -0.5, 0.25, 1.0), (8.0, 1e-7, dtype)
            compiled = compile_launch(
                self.gpu,
                package,
                self.kernel,
                lambda module, arguments=arguments: (*arguments, module.SmallConfig(*self.config)),
            )
        return compiled


def module(lab: Lab, kernel: str) -> ModuleType:
    """Return the kernel's module in the package."""
    return importlib.import_module(f"{lab.kernel.__name__}.kernels.gpu.{kernel}")


def capability(lab: Lab) -> tuple[int, int]:
    """Return the GPU's compute capability; in a dry run that of a GPU that this machine does not have."""
    return torch.cuda.get_device_capability(lab.device) if lab.device.type == "cuda" else (9, 0)


def target(lab: Lab) -> tuple:
    """Return the target that kernels are compiled for, as the package's type."""
    major, minor = capability(lab)
    return lab.kernel.kernels.gpu.tuned.Target("cuda", 10 * major + minor)


def product_launches(lab: Lab, dtype: torch.dtype) -> list[Launch]:
    """Return the symmetric product's configurations to try in one dtype, the safe ones first."""
    tuned = lab.kernel.kernels.gpu.tuned
    if lab.tiny:
        configs = [tuned.Config(tile, tile_k, GROUP, *rest) for tile, tile_k, *rest in TINY_SHAPES]
    else:
        configs = [tuned.safe_config(target(lab), dtype, m, True, True) for m in (1, 10**6)]
        configs += [tuned.Config(tile, tile_k, GROUP, *rest) for tile, tile_k, *rest in SHAPES]
        configs += [tuned.Config(s[0], s[1], group, *s[2:]) for s in REGROUPED for group in GROUPS]
        configs += tuned.usual_configs(target(lab), dtype)
    return [Launch(PRODUCT, dtype, config) for config in dict.fromkeys(configs)]


def small_launches(lab: Lab, dtype: torch.dtype, side: int) -> list[Launch]:
    """Return the configurations to try for small matrices padded to `side` rows, the safe one first.

    They are tuned in float16, in which Muon works on GPUs. Other dtypes use the safe one.
    """
    tuned = lab.kernel.kernels.gpu.tuned
    configs = [tuned.safe_small_config(target(lab), dtype, side)]
    if not lab.tiny and dtype == torch.float16:
        choices = product(*PANELS[side])
        configs += [tuned.SmallConfig(side, *panel, warps, SMALL_STAGES, 0) for panel, warps in choices]
        configs += tuned.usual_small_configs(target(lab), dtype, side)
    return [Launch(SMALL, dtype, config) for config in dict.fromkeys(configs)]


def small_sides(lab: Lab) -> tuple[int, ...]:
    """Return the numbers of rows to which small matrices are padded."""
    return lab.kernel.kernels.gpu.tuned.PADDED_SIDES[: 1 if lab.tiny else None]


def all_launches(lab: Lab) -> Iterator[Launch]:
    """Yield every configuration that may be chosen, and the safe ones of float32."""
    tuned, halves = lab.kernel.kernels.gpu.tuned, lab.kernel.kernels.formats.HALF_DTYPES
    for dtype in halves:
        yield from product_launches(lab, dtype)
    yield Launch(PRODUCT, torch.float32, tuned.safe_config(target(lab), torch.float32, 1, True, True))
    for side, dtype in product(small_sides(lab), (*halves, torch.float32)[: 1 if lab.tiny else None]):
        yield from small_launches(lab, dtype, side)


def examine(lab: Lab) -> dict:
    """Compile all candidates ahead, in parallel, and return what is wrong with those that are not to be launched.

    Where `lint_target` is the GPU itself, what is compiled here lies in Triton's cache when it is launched. Contests
    would compile one kernel after the other, and each candidate has four, which take seconds.
    """
    require_triton(lab)
    one = 1 if lab.tiny else None  # enough to see that it works, where each takes seconds
    pairs = [(launch.key, case) for launch in all_launches(lab) for case in cases(lab, launch)][:one]
    rows = examine_all(Path(lab.kernel.__file__).parent, [case for _, case in pairs], one)
    problems: dict[str, list[str]] = {}
    for (key, _), row in zip(pairs, rows):
        if row.problems:
            problems.setdefault(key, []).extend(row.problems)
    mark = _mark_in_cache()
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(_identity(lab))
    return {"refused": problems}


def is_checked_here(lab: Lab) -> bool:
    """Whether the static check has filled Triton's cache on this machine: records may come from another."""
    mark = _mark_in_cache()
    return mark.exists() and mark.read_text() == _identity(lab)


def _mark_in_cache() -> Path:
    """Return the file in Triton's cache that says for what it was filled. Names of machines do not tell containers."""
    return Path(triton.knobs.cache.dir) / "filled_by_the_lab"


def _identity(lab: Lab) -> str:
    """Return what the records are of: device, commit, versions."""
    return json.dumps((read(lab.out / FILE) or ({}, []))[0])


def static_check(lab: Lab) -> dict | None:
    """Return what the static check has found, in an earlier run if this one's did not come to its end."""
    contents = read(lab.out / FILE) or ({}, [])
    return next((record.value for record in contents[1] if record.key == STATIC_CHECK), None)


def cases(lab: Lab, launch: Launch) -> Iterator[AnyCase]:
    """Yield what Triton compiles of a launch."""
    config = tuple(launch.config)
    if launch.kernel == PRODUCT and config in lab.kernel.kernels.gpu.tuned.COMPILED:
        return
    if launch.kernel == PRODUCT:
        for layout in RACED:
            yield Case(lint_target(lab), layout, short(launch.dtype), *LARGE, config, competes=True)
    elif launch.dtype == torch.float16:
        yield RacedSmall(lint_target(lab), True, short(launch.dtype), config[0], config, competes=True)
    else:
        for aligned in (True, False):
            yield SmallPolarCase(lint_target(lab), aligned, short(launch.dtype), config[0], config)


def lint_target(lab: Lab) -> str:
    """Return the GPU among those of `tools/lint/kernels.py` that has this one's limits, or is nearest below it.

    Compute capability 8.6 and 8.9 have as little shared memory as 12.0.
    """
    major, minor = capability(lab)
    if (major, minor) in ((8, 6), (8, 9)):
        return "sm_120"
    return {8: "sm_80", 9: "sm_90", 10: "sm_100", 11: "sm_100", 12: "sm_120"}.get(major, f"sm_{major}{minor}")


def fit(lab: Lab, launches: Iterable[Launch]) -> list[Launch]:
    """Return those launches that the static check has not refused."""
    refused = (static_check(lab) or {"refused": ()})["refused"]
    return [launch for launch in launches if launch.key not in refused]
