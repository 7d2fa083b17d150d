"""The compiled operations give the same bits at each level of x86-64 that the running CPU has."""

from __future__ import annotations

import dataclasses
import itertools
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from tools.build import compilers, machines, variants
from tools.emulation.operations import (
    FLOATS,
    descended,
    packed,
    packed_by_columns,
    packed_in_8_bits,
    ways_to_descend,
)

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
    revision = dataclasses.replace(job.revision, tree=f"level{len(request.param)}{request.param[-1]}", dirty=False)
    shipped_line = compilers.compile_line

    def compile_line(*arguments):
        return [*shipped_line(*arguments), f"-march={request.param}", "-DOPTIMIZER_CLONES="]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilers, "compile_line", compile_line)
        library = compilers.compile_library(dataclasses.replace(job, revision=revision))
    torch.ops.load_library(library)
    return getattr(torch.ops, library.name.split(".")[0])


@pytest.fixture(scope="session")
def native(kernel):
    """The operations as they are shipped, which choose the level by themselves."""
    return kernel.kernels.native


@pytest.mark.slow
def test_every_level_packs_the_same_bits(native, operations):
    for *dtypes, nesterov in itertools.product(FLOATS, FLOATS, FLOATS, (True, False)):
        results = zip(packed(native, dtypes, nesterov), packed(operations, dtypes, nesterov))
        assert all(torch.equal(shipped, of_level) for shipped, of_level in results), (dtypes, nesterov)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_level_transposes_the_same_bits(native, operations, dtype):
    results = zip(packed_by_columns(native, dtype), packed_by_columns(operations, dtype))
    assert all(torch.equal(shipped, of_level) for shipped, of_level in results)


@pytest.mark.slow
def test_every_level_packs_the_same_bits_of_momentum_in_8_bits(native, operations):
    for *dtypes, nesterov in itertools.product(FLOATS, FLOATS, (True, False)):
        results = zip(packed_in_8_bits(native, dtypes, nesterov), packed_in_8_bits(operations, dtypes, nesterov))
        assert all(torch.equal(shipped, of_level) for shipped, of_level in results), (dtypes, nesterov)


@pytest.mark.slow
def test_every_level_descends_to_the_same_bits(native, operations):
    for *dtypes, decay_mode in itertools.product(FLOATS, FLOATS, range(3)):
        for options in ways_to_descend(dtypes[0]):
            results = zip(*(descended(x, dtypes, decay_mode, **options) for x in (native, operations)))
            assert all(torch.equal(shipped, of_level) for shipped, of_level in results), (dtypes, decay_mode, options)


@pytest.mark.skipif(not levels(), reason="clones are made on x86-64 alone")
@pytest.mark.parametrize(("release", "has_clones"), [(11, False), (12, True)])
def test_gcc_before_12_builds_without_clones(repository, release, has_clones):
    """It does not know these levels as targets."""
    command = ["g++", "-std=c++20", f"-I{machines.TORCH / 'include'}", "-U__GNUC__", f"-D__GNUC__={release}"]
    command += ["-E", "-dM", "-x", "c++", repository / "optimizer_cpu/tiles.h"]
    macros = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (definition,) = [line for line in macros.splitlines() if line.startswith("#define OPTIMIZER_CLONES")]
    assert ("target_clones" in definition) == has_clones
