"""The CUDA sources compile into what the devices need; no GPU takes part."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.other_machine import HERE, OTHER, code_for_gpus
from tools.build import compilers, machines, variants
from tools.build.commands import BuildError
from tools.build.loading import libraries_of_cuda
from tools.lint import hopper
from tools.pins.verify import faults

ARCHS = ["sm_100", "sm_75", "sm_80", "sm_90"]
HOPPER_ARCH = "sm_90a"
HOPPER_KERNELS = 6  # two dtypes by three orders of operands
# Two operations, each in float and in double: one of them also with remainders, and in float without what is rare; the
# other also in 8 bits. One for each size of the elements that are copied. A norm's two, and the division by it, both
# also for lines.
KERNELS = 17
# The most bytes of a thread on the stack. In float a thread moves 16 elements, each of at least 10 bytes: 24 are less
# than a sixth of that. Double is rare: its bound is what the compiler keeps there, to notice more. So is that of 10.0,
# whose compiler keeps a quarter there where tensors lie along unlike lines, and nothing where it is given registers for
# four blocks. But five have more loads on their way, which the accesses that are usual need.
STACK, STACK_IN_DOUBLE = {"sm_100": 40, "sm_75": 24, "sm_80": 24, "sm_90": 24}, 104
# They load and store single elements of square tiles, or sum what is left of them.
BY_TILES = ("sum_squares", "sum_rows", "take_roots", "scale_tiles", "scale_rows", "pack_codes")
LOADING_TILES = ("sum_squares", "sum_rows", "scale_tiles", "scale_rows")


def what_is_missing() -> str:
    """What keeps these tests from running here, and how to get it; empty if nothing does."""
    try:
        compilers.find_cuda()
    except BuildError as error:
        return str(error)
    if compilers.find_cutlass() is None:
        return "there are no headers of CUTLASS: requirements/cuda.txt"
    return "" if cuobjdump() else "there is no cuobjdump; it comes with triton and with the CUDA toolkit"


def cuobjdump() -> str | None:
    """The tool of the Triton package, else that on the PATH."""
    triton = find_spec("triton")
    folders = (
        [str(Path(folder) / "backends/nvidia/bin") for folder in triton.submodule_search_locations or ()]
        if triton
        else []
    )
    return shutil.which("cuobjdump", path=os.pathsep.join(folders)) or shutil.which("cuobjdump")


def in_double(name: str) -> bool:
    """Whether a kernel's mangled name has double as its first argument."""
    return re.search(r"(descend_kernel|pack|pack_codes)Id", name) is not None


MISSING = what_is_missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture(scope="module")
def cuda_variant(repository, tmp_path_factory) -> Path:
    (built,) = variants.build_variants(repository, ["cuda"], tmp_path_factory.mktemp("cuda"))
    return built.path


@pytest.fixture(scope="module")
def look(cuda_variant):
    """Returns what cuobjdump tells about the library."""
    (library,) = cuda_variant.glob("*.so")

    def look(*options: str) -> str:
        return subprocess.run([cuobjdump(), *options, library], check=True, capture_output=True, text=True).stdout

    return look


def test_library_has_machine_code_and_ptx_for_newer_archs(look):
    assert sorted(set(re.findall(r"\.(sm_\w+)\.cubin", look("-lelf")))) == [*ARCHS, HOPPER_ARCH]
    assert set(re.findall(r"\.(sm_\w+)\.ptx", look("-lptx"))) == {"sm_80", "sm_100"}


def test_kernels_keep_little_of_a_thread_on_the_stack(look):
    """Bounds on blocks (tiles.cuh) push some registers there, into the first cache; tensors move past it."""
    for arch, most in STACK.items():
        usage = look("-arch", arch, "-res-usage")
        used = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
        assert len(used) == KERNELS + (HOPPER_KERNELS if arch == "sm_90" else 0)  # whose 9.0a is shown with 9.0
        assert all(local == "0" for _, _, local in used)
        bounds = {name: STACK_IN_DOUBLE if in_double(name) else most for name, _, _ in used}
        assert [name for name, stack, _ in used if int(stack) > bounds[name]] == []


def test_kernels_load_and_store_16_bytes_at_once(look):
    kernels = [kernel for arch in ARCHS for kernel in look("-arch", arch, "-sass").split("Function :")[1:]]
    kernels = [
        kernel for kernel in kernels if not any(name in kernel.split()[0] for name in (hopper.KERNEL, *BY_TILES))
    ]
    assert len(kernels) == (KERNELS - len(BY_TILES) - 1) * len(ARCHS)  # `pack_codes` is in float and in double
    assert all("LDG.E.128" in kernel and "STG.E.128" in kernel for kernel in kernels)


def test_kernels_that_go_by_tiles_have_many_loads_under_way(look):
    """A thread's 16 elements of a tile are asked for before the first of them is waited for."""
    for arch, loading in itertools.product(ARCHS, LOADING_TILES):
        kernels = [each for each in look("-arch", arch, "-sass").split("Function :")[1:] if loading in each.split()[0]]
        assert kernels, loading
        for kernel in kernels:
            accesses = re.findall(r"\b(LDG|STS|STG)\b", kernel)
            assert max(len(list(run)) for name, run in itertools.groupby(accesses) if name == "LDG") >= 14


def test_the_product_for_hopper_does_its_work_as_it_is_meant_to(cuda_variant):
    (library,) = cuda_variant.glob("*.so")
    kernels = hopper.read_kernels(library)
    assert len(kernels) == HOPPER_KERNELS
    assert [list(hopper.problems(kernel)) for kernel in kernels] == [[]] * HOPPER_KERNELS


def test_cuda_variant_verifies_as_intact(cuda_variant):
    assert faults(cuda_variant) == []


def test_gpus_run_the_same_code_beside_another_processor(cuda_variant, other_cuda_variant, repository, tmp_path):
    """So what an H200 has proven beside x86-64 holds for the GPU of a GH200, which stands beside an aarch64."""
    pairs = zip((cuda_variant, other_cuda_variant), (HERE, OTHER))
    here, there = (code_for_gpus(*variant.glob("*.so"), processor, tmp_path) for variant, processor in pairs)
    assert here == there
    assert len(here) == len(list((repository / "optimizer_cuda").rglob("*.cu")))


def test_cuda_variant_passes_operation_tests_on_cpu(repository, cuda_variant, tmp_path):
    """The tests of the operations, with the CUDA variant loaded; a torch without CUDA gets the symbol it lacks."""
    environment = {**os.environ, "LOCAL_KERNELS": f"org/optimizer={cuda_variant}", "CUDA_VISIBLE_DEVICES": ""}
    if not (machines.TORCH / "lib/libtorch_cuda.so").exists():
        libraries = libraries_of_cuda(compilers.find_cuda(), machines.find_machine(), tmp_path)
        environment["LD_PRELOAD"] = ":".join(map(str, libraries))
    tests = [
        repository / f"tests/kernels/test_{name}.py"
        for name in ("native_ops", "native_contract", "stochastic_rounding", "move_blocks", "move_blocks_contract")
    ]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
