"""The compiler is the one that the user names, and a variant says for which machine it is."""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from kernels.variants import get_variants_local, resolve_variant

from tests.support.other_machine import HERE, OTHER, code_for_gpus, missing_for
from tests.support.toy_kernel import commit
from tools.build import compilers, machines, variants
from tools.build.commands import BuildError, run
from tools.build.machines import find_machine

MISSING, MISSING_FOR_CUDA = missing_for(OTHER), missing_for(OTHER, "cuda")


def newest(program: str) -> str | None:
    """Return the newest `program` of Debian's, which have their release in the name, that is installed."""
    names = [program, *(f"{program}-{release}" for release in range(30, 15, -1))]
    return next(filter(None, map(shutil.which, names)), None)


def stand_in(folder: Path, program: str, says: str) -> str:
    """Write a compiler that only says for what it makes code."""
    (folder / program).write_text(f"#!/bin/sh\necho {says}\n")
    (folder / program).chmod(0o755)
    return str(folder / program)


def test_the_compiler_is_the_one_that_cxx_names_with_its_options(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert find_machine().compiler == ("g++",)
    monkeypatch.setenv("CXX", "g++ -pipe")
    assert find_machine().compiler == ("g++", "-pipe")


def test_every_source_and_the_library_are_made_by_that_compiler(toy, tmp_path, monkeypatch):
    """A build that called another one as well would mix their libraries."""
    called = tmp_path / "called"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {called}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert variants.build_variants(toy, ["cpu"], tmp_path / "out")
    lines = called.read_text().splitlines()
    assert sum(" -c " in line for line in lines) == 3  # the two sources of the toy, and the shim
    assert sum("-shared" in line for line in lines) == 1


def test_a_compiler_for_another_machine_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", stand_in(tmp_path, "compiler", f"{OTHER}-linux-gnu"))
    with pytest.raises(BuildError, match=f"compiler makes code for {OTHER}-linux-gnu, not for {HERE}: set CXX"):
        find_machine()
    assert not find_machine(OTHER).is_here


def test_an_absent_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler is needed and not on the PATH"):
        find_machine()


def test_the_torch_of_another_machine_is_asked_for(toy, tmp_path, monkeypatch):
    """Before anything is written."""
    monkeypatch.setattr(machines, "FOREIGN_TORCHES", tmp_path / "none")
    monkeypatch.setenv("CXX", stand_in(tmp_path, "compiler", f"{OTHER}-linux-gnu"))
    with pytest.raises(BuildError, match=f"no torch for {OTHER} in .*: make torch-{OTHER}"):
        variants.build_variants(toy, ["cpu"], tmp_path / "out", OTHER)
    assert not (tmp_path / "out").exists()


def test_the_cudart_of_another_machine_is_asked_for(tmp_path, monkeypatch):
    """A machine that has its torch from a time before there was a libcudart beside it lacks it."""
    monkeypatch.setattr(variants, "find_cuda", lambda: compilers.Cuda("nvcc", Path("/cuda"), "13.0"))
    other = replace(find_machine(), processor=OTHER, torch=tmp_path / "torch")
    with pytest.raises(BuildError, match=f"no libcudart.so.13 for {OTHER} in {tmp_path}/.*: make torch-{OTHER}"):
        variants.toolkit("cuda", other)


@pytest.mark.parametrize(("system", "processor"), [("linux", "riscv64"), ("darwin", "aarch64")])
def test_systems_without_a_variant_are_refused(monkeypatch, system, processor):
    monkeypatch.setattr(machines.sys, "platform", system)
    monkeypatch.setattr(machines.platform, "machine", lambda: processor)
    with pytest.raises(BuildError, match=f"for Linux on x86_64 and aarch64, not for {processor}-{system}"):
        find_machine()


def test_symbols_that_are_the_same_in_all_libraries_are_refused_where_the_compiler_makes_them(toy, tmp_path):
    """Clang has no such symbols, and no flag against them."""
    for program in filter(None, (shutil.which("g++"), newest("clang++"))):
        machine = replace(find_machine(), compiler=(program,))
        assert machine.takes(compilers.NOT_UNIQUE) == ("clang" not in program)
        assert not machine.takes("-fno-such-flag") and machine.takes("-O2")
        job = variants.plan(toy, variants.read_build(toy), "cpu", tmp_path, machine)
        line = compilers.compile_line(job, Path("toy_cpu/toy.cpp"), tmp_path / "toy.o")
        assert (compilers.NOT_UNIQUE in line) == machine.takes(compilers.NOT_UNIQUE)


def test_clang_builds_what_loads(imported_toy, tmp_path, monkeypatch):
    compiler = newest("clang++")
    if compiler is None:
        pytest.skip("there is no clang++ of release 16 or later")
    monkeypatch.setenv("CXX", compiler)
    (built,) = variants.build_variants(imported_toy, ["cpu"], tmp_path / "out")
    assert "clang" in run(["readelf", "--string-dump=.comment", next(built.path.glob("*.so"))])
    assert built.loaded.startswith("torch ")


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_cross_compiler_makes_a_variant_of_the_other_machine(imported_toy, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    (built,) = variants.build_variants(imported_toy, ["cpu"], tmp_path / "out", OTHER)
    assert built.path.name == f"torch-stable-abi211-cpu-{OTHER}-linux"
    assert built.loaded == f"not loaded: for {OTHER}-linux"
    header = run(["readelf", "--file-header", next(built.path.glob("*.so"))])
    assert {"aarch64": "AArch64", "x86_64": "X86-64"}[OTHER] in header
    local_variants = get_variants_local(tmp_path / "out")
    assert resolve_variant(local_variants, "cpu")[0] is None
    monkeypatch.setattr(platform, "machine", lambda: OTHER)
    assert resolve_variant(local_variants, "cpu")[0].variant_str == built.path.name


@pytest.mark.skipif(bool(MISSING_FOR_CUDA), reason=MISSING_FOR_CUDA)
def test_nvcc_makes_the_same_code_for_gpus_beside_another_processor(toy, tmp_path, monkeypatch):
    """nvcc has the cross compiler compile what runs on the CPU, here behind a launcher, with this machine's headers."""
    (toy / "toy_cuda/toy.cu").write_text("#include <cuda/std/tuple>\n" + (toy / "toy_cuda/toy.cu").read_text())
    commit(toy)
    made = []
    for name in machines.PROCESSORS:
        monkeypatch.setenv("CXX", f"env {'g++' if name == HERE else f'{name}-linux-gnu-g++'} -pipe")
        made += variants.build_variants(toy, ["cuda"], tmp_path / name, name)
    monkeypatch.delenv("CXX")
    assert [built.path.name for built in made] == [f"torch-stable-abi211-cu130-{n}-linux" for n in machines.PROCESSORS]
    libraries = [next(built.path.glob("*.so")) for built in made]
    codes = [code_for_gpus(*each, tmp_path) for each in zip(libraries, machines.PROCESSORS)]
    assert codes[0] == codes[1] and len(codes[0]) == 1


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_an_undefined_symbol_is_refused_for_the_other_machine_too(toy, tmp_path):
    """Nothing is imported there, so that this is the only check."""
    with (toy / "toy_cpu/toy.cpp").open("a") as source:
        source.write('extern "C" int of_another_library();\nint use() { return of_another_library(); }\n')
    with pytest.raises(BuildError, match="undefined symbol: of_another_library"):
        variants.build_variants(toy, ["cpu"], tmp_path / "out", OTHER)


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_newer_glibc_is_refused_for_the_other_machine_too(toy, tmp_path, monkeypatch):
    link_line = compilers.link_line

    def without_shim(*arguments):
        return [word for word in link_line(*arguments) if Path(word).name != "glibc_shim.o"]

    monkeypatch.setattr(compilers, "link_line", without_shim)
    with pytest.raises(BuildError, match=r"manylinux_2_28: .*__libc_single_threaded"):
        variants.build_variants(toy, ["cpu"], tmp_path / "out", OTHER)
