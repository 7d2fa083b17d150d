"""A library that would not load everywhere is refused: one test for each way in which one was made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.build import abi_check, compilers, machines, variants
from tools.build.commands import BuildError
from tools.build.variant_metadata import read_metadata

OURS = compilers.link_line
needs_nvcc = pytest.mark.skipif(compilers.find_nvcc() is None, reason="there is no nvcc")


def use(toy: Path, declaration: str, call: str) -> None:
    with (toy / "toy_cpu/toy.cpp").open("a") as source:
        source.write(f"{declaration}\nvoid use() {{ {call}; }}\n")


@pytest.mark.parametrize(
    ("removed", "first", "complaint"),
    [
        ({"-ltorch"}, [], r"not linked against libtorch\.so"),
        ({"glibc_shim.o"}, [], "manylinux_2_28: .*__libc_single_threaded"),
        (set(), ["-lstdc++"], "manylinux_2_28: .*ostringstream.*GLIBCXX"),
    ],
)
def test_a_library_linked_with_other_libraries_first_or_without_some_is_refused(
    toy, tmp_path, monkeypatch, removed, first, complaint
):
    def link_line(job, objects, library):
        return [word for word in OURS(job, [*objects, *first], library) if Path(word).name not in removed]

    monkeypatch.setattr(compilers, "link_line", link_line)
    with pytest.raises(BuildError, match=complaint):
        variants.build_variants(toy, ["cpu"], tmp_path / "out")


@pytest.mark.parametrize(
    ("declaration", "call", "complaint"),
    [
        ("namespace c10 { void f(); }", "c10::f()", r"torch stable ABI 2\.11: c10::f\(\) is not part of it"),
        ("namespace torch { void f(); }", "torch::f()", r"torch::f\(\) is not part of it"),
        ('extern "C" int torch_tag_core();', "torch_tag_core()", r"torch_tag_core came with torch 2\.12"),
        ('extern "C" int PyUnicode_AsUTF8(int);', "PyUnicode_AsUTF8(0)", r"Python ABI 3\.9: .*PyUnicode_AsUTF8"),
    ],
    ids=["c10", "torch", "newer shim", "Python"],
)
def test_symbol_outside_stable_interfaces_is_refused(toy, tmp_path, declaration, call, complaint):
    use(toy, declaration, call)
    with pytest.raises(BuildError, match=complaint):
        variants.build_variants(toy, ["cpu"], tmp_path / "out")


def test_symbol_that_no_linked_library_has_is_refused(toy, tmp_path):
    """The linker lets it pass, as the interpreter's symbols, and the import would be the first to tell."""
    use(toy, 'extern "C" int of_another_library();', "of_another_library()")
    with pytest.raises(BuildError, match=r"(?m)^undefined symbol: of_another_library$"):
        variants.build_variants(toy, ["cpu"], tmp_path / "out")


def test_symbol_of_a_linked_library_is_accepted(toy, tmp_path):
    use(toy, 'extern "C" int aoti_torch_device_type_cpu();', "aoti_torch_device_type_cpu()")
    assert variants.build_variants(toy, ["cpu"], tmp_path / "out")


def test_shims_as_old_as_the_target_are_accepted(toy, tmp_path):
    use(toy, 'extern "C" int torch_dtype_float8_e8m0fnu();', "torch_dtype_float8_e8m0fnu()")
    assert variants.build_variants(toy, ["cpu"], tmp_path / "out")


def test_a_function_whose_version_rose_since_glibc_2_28_is_accepted(toy, tmp_path):
    """As the headers of torch 2.15 use it; the shim binds it to the version that every glibc has."""
    use(toy, "#include <dlfcn.h>\nvoid* symbol;", 'symbol = dlsym(RTLD_DEFAULT, "printf")')
    (built,) = variants.build_variants(toy, ["cpu"], tmp_path / "out")
    symbols = compilers.run(["nm", "-D", "--undefined-only", built.path / f"{built.ops}.abi3.so"])
    assert re.search(r"dlsym@GLIBC_2\.(2\.5|17)\b", symbols)


def test_stripped_library_is_refused(toy, tmp_path):
    (built,) = variants.build_variants(toy, ["cpu"], tmp_path / "out")
    job = variants.plan(toy, variants.read_build(toy), "cpu", tmp_path)
    with pytest.raises(BuildError, match="is stripped"):
        abi_check.violations(built.path / f"{built.ops}.abi3.so", job)


def test_library_holds_no_paths_of_the_build_machine(toy, tmp_path):
    (built,) = variants.build_variants(toy, ["cpu"], tmp_path / "out")
    library = (built.path / f"{built.ops}.abi3.so").read_bytes()
    assert b"toy_cpu/toy.cpp" in library
    assert str(tmp_path).encode() not in library
    assert str(machines.TORCH).encode() not in library


def test_variant_needs_glibc_2_28_or_older(variant):
    """It links libtorch, and not libtorch_python."""
    (library,) = variant.glob("*.abi3.so")
    assert tuple(map(int, abi_check.newest_version(library, "GLIBC").split("."))) <= (2, 28)
    needed = compilers.run(["readelf", "--dynamic", library])
    assert "[libtorch.so]" in needed and "libtorch_python" not in needed


def test_versions_are_compared_as_numbers(monkeypatch):
    monkeypatch.setattr(abi_check, "run", lambda command: "U a@GLIBC_2.9\nU b@GLIBC_2.14\nU c@GLIBCXX_3.4\n")
    assert abi_check.newest_version(Path("x.so"), "GLIBC") == "2.14"
    assert abi_check.newest_version(Path("x.so"), "CXXABI") == "none"


@pytest.mark.slow
@needs_nvcc
def test_cuda_variant_covers_three_archs_and_newer_by_ptx(toy, tmp_path):
    (built,) = variants.build_variants(toy, ["cuda"], tmp_path / "out")
    assert built.path.name.startswith("torch-stable-abi211-cu13")
    assert read_metadata(built.path).backend.archs == ["8.0", "9.0", "10.0+PTX"]
    cuobjdump = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
    listed = compilers.run([cuobjdump, "--list-elf", "--list-ptx", built.path / f"{built.ops}.abi3.so"])
    assert set(re.findall(r"\.(sm_\d+\.\w+)", listed)) == {"sm_80.cubin", "sm_90.cubin", "sm_100.cubin", "sm_100.ptx"}


@pytest.mark.slow
@needs_nvcc
def test_static_cudart_is_refused(toy, tmp_path, monkeypatch):
    def link_line(*arguments):
        static = ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        return [word for word in OURS(*arguments) if not str(word).startswith("-l:libcudart")] + static

    monkeypatch.setattr(compilers, "link_line", link_line)
    with pytest.raises(BuildError, match=r"(?s)manylinux_2_28: .*not linked against libcudart\.so\.13"):
        variants.build_variants(toy, ["cuda"], tmp_path / "out")
