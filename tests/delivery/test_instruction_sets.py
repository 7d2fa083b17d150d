"""The compiled operations give the same bits at each level of x86-64 that the running CPU has."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tools.build import compilers, variants

FLOATS = torch.float32, torch.float64, torch.bfloat16, torch.float16
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SHAPE = 5, 900
# What each level adds to the one before, as Linux names it. What v2 adds plays no part in these formulas.
ADDED = {
    "x86-64": set(),
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


def levels() -> list[str]:
    """The levels of the running CPU."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return []
    described = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0]
    missing = (added - set(described.split()) for added in ADDED.values())
    return [level for level, _ in itertools.takewhile(lambda pair: not pair[1], zip(ADDED, missing))]


@pytest.fixture(scope="module", params=levels())
def operations(request, repository, tmp_path_factory):
    """The operations compiled for one level alone."""
    job = variants.plan(repository, variants.read_build(repository), "cpu", tmp_path_factory.mktemp("level"))
    own_name = dataclasses.replace(job.revision, tree=f"level{len(request.param)}{request.param[-1]}", dirty=False)
    shipped_line = compilers.compile_line

    def compile_line(*arguments):
        return [*shipped_line(*arguments), f"-march={request.param}", "-DOPTIMIZER_CLONES="]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilers, "compile_line", compile_line)
        library = compilers.compile_library(dataclasses.replace(job, revision=own_name))
    torch.ops.load_library(library)
    return getattr(torch.ops, library.name.split(".")[0])


@pytest.fixture(scope="session")
def native(kernel):
    """The operations as they are shipped, which choose the level by themselves."""
    return kernel.kernels.native


@functools.cache
def values(dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of all sizes, among them subnormal and infinite ones, zeros of both signs and NaN."""
    generator, limits = torch.Generator().manual_seed(seed), torch.finfo(dtype)
    sizes = torch.rand(SHAPE, generator=generator, dtype=torch.float64) * 30 - 15
    drawn = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) * sizes.exp2()).to(dtype)
    subnormal = limits.smallest_normal / 3
    special = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, limits.max, limits.smallest_normal, subnormal, -subnormal]
    chosen = torch.randint(len(special), SHAPE, generator=generator)
    rare = torch.rand(SHAPE, generator=generator) < 0.3
    return torch.where(rare, torch.tensor(special, dtype=dtype)[chosen], drawn)


def bits(x: Tensor) -> Tensor:
    """The bits of `x`, those of NaN all the same: which NaN an operation gives is not promised."""
    return x.masked_fill(x.isnan(), torch.nan).contiguous().view(BITS[x.element_size()])


def packed(operations, dtypes, nesterov: bool) -> list[Tensor]:
    momentum, gradient = values(dtypes[0], 0).clone(), values(dtypes[1], 1)
    result = torch.zeros(1, *SHAPE, dtype=dtypes[2])
    scale = torch.tensor(3.0)
    operations.momentum_pack_([momentum], [gradient], result, 0.95, nesterov, grad_scale=scale)
    return [bits(momentum), bits(result)]


def packed_in_8_bits(operations, dtypes, nesterov: bool) -> list[Tensor]:
    gradient, result = values(dtypes[0], 1), torch.zeros(1, *SHAPE, dtype=dtypes[1])
    codes, scale = torch.zeros(SHAPE, dtype=torch.int8), torch.zeros(SHAPE[0], -(-SHAPE[1] // 64))
    for given in gradient.nan_to_num(1.0, 2.0, -2.0), gradient:  # so that there is an average when it comes
        operations.momentum_pack_([codes], [given], result, 0.95, nesterov, momentum_scale=[scale])
    return [codes.view(torch.uint8), bits(scale), bits(result)]


def descended(operations, dtypes, decay_mode: int, halves: bool = False, **options) -> list[Tensor]:
    parameter, update = values(dtypes[0], 0).clone(), values(dtypes[1], 1)
    remainder = torch.randint(-(1 << 15), 1 << 15, SHAPE, generator=torch.Generator().manual_seed(2)).to(torch.int16)
    options |= {"remainder": [remainder]} if halves else {}
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (0.02, 0.1, 1.5)]
    operations.descend_(
        [parameter], update[None], *numbers, decay_mode, row_scale=torch.full(SHAPE[:1], 0.7), **options
    )
    return [bits(parameter), remainder]


@pytest.mark.slow
def test_every_level_packs_the_same_bits(native, operations):
    for *dtypes, nesterov in itertools.product(FLOATS, FLOATS, FLOATS, (True, False)):
        results = zip(packed(native, dtypes, nesterov), packed(operations, dtypes, nesterov))
        assert all(torch.equal(shipped, own) for shipped, own in results), (dtypes, nesterov)


@pytest.mark.slow
def test_every_level_packs_the_same_bits_of_momentum_in_8_bits(native, operations):
    for *dtypes, nesterov in itertools.product(FLOATS, FLOATS, (True, False)):
        results = zip(packed_in_8_bits(native, dtypes, nesterov), packed_in_8_bits(operations, dtypes, nesterov))
        assert all(torch.equal(shipped, own) for shipped, own in results), (dtypes, nesterov)


@pytest.mark.slow
def test_every_level_descends_to_the_same_bits(native, operations):
    for *dtypes, decay_mode in itertools.product(FLOATS, FLOATS, range(3)):
        every = [{}]
        every += [{"seeds": torch.tensor([5])}] if dtypes[0].itemsize == 2 else []
        every += [{"halves": True}] if dtypes[0] == torch.bfloat16 else []
        for options in every:
            results = zip(*(descended(x, dtypes, decay_mode, **options) for x in (native, operations)))
            assert all(torch.equal(shipped, own) for shipped, own in results), (dtypes, decay_mode, options)


@pytest.mark.skipif(not levels(), reason="clones are made on x86-64 alone")
@pytest.mark.parametrize(("release", "has_clones"), [(11, False), (12, True)])
def test_gcc_before_12_builds_without_clones(repository, release, has_clones):
    """It does not know these levels as targets."""
    command = ["g++", "-std=c++20", f"-I{compilers.TORCH / 'include'}", "-U__GNUC__", f"-D__GNUC__={release}"]
    command += ["-E", "-dM", "-x", "c++", repository / "optimizer_cpu/tiles.h"]
    macros = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (definition,) = [line for line in macros.splitlines() if line.startswith("#define OPTIMIZER_CLONES")]
    assert ("target_clones" in definition) == has_clones
