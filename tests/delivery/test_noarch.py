"""Variants without a library: what is in them, and who reads them."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

import pytest
import torch
from kernels.validate import ArchValidator

from benchmarks.built_kernel import find_variant
from tests.support.toy_kernel import git, write_toy_kernel
from tools.build import variant_metadata, variants
from tools.build.noarch import NOARCH_BACKENDS, noarch_recipe
from tools.build.recipe import read_build
from tools.hub.release import read_release
from tools.lab.variant import usable
from tools.pins.verify import faults

NOARCH = ["torch-cpu", "torch-cuda", "torch-rocm", "torch-metal", "torch-xpu"]
FILES = {"__init__.py", "_ops.py", "data/sizes.json", "metadata.json"}


def build_noarch(root: Path, output: Path) -> list[variants.Built]:
    return variants.build_variants(root, ["noarch"], output)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("noarch")
    with pytest.MonkeyPatch.context() as patch:  # test_loading.py imports what is built
        patch.setattr(variants, "load", lambda variant, job: "nothing")
        variants.build_variants(write_toy_kernel(folder / "toy"), ["cpu", "noarch"], folder / "both")
    return folder / "both"


@pytest.fixture
def both(original, tmp_path) -> Path:
    """A folder with the compiled variant for CPUs and all without a library."""
    return shutil.copytree(original, tmp_path / "both")


def test_noarch_variants_are_made_unless_a_backend_is_named(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "unavailable_backends", lambda tables, processor: {"cuda": "not here"})
    built = variants.build_variants(toy, None, tmp_path / "all")
    assert [each.path.name for each in built] == ["torch-stable-abi211-cpu-x86_64-linux", *NOARCH]
    assert [each.path.name for each in variants.build_variants(toy, ["cpu"], tmp_path / "cpu")] == [built[0].path.name]


def test_a_machine_that_can_compile_nothing_makes_them(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(variants, "compile_library", lambda job: pytest.fail("nothing is to be compiled"))
    built = variants.build_variants(toy, None, tmp_path / "out")
    assert [each.path.name for each in built] == NOARCH
    assert {(each.glibc, each.glibcxx) for each in built} == {("-", "-")}
    said = variants.summary(built)
    assert (said.row_count, said.caption) == (len(NOARCH), "Checked: metadata")


def test_a_noarch_variant_is_the_package_and_the_name_of_its_operators(toy, tmp_path):
    tree = git(toy, "rev-parse", "HEAD^{tree}")[:7]
    for backend, built in zip(NOARCH_BACKENDS, build_noarch(toy, tmp_path / "out"), strict=True):
        assert built.path.name == f"torch-{backend}" and set(contents(built.path)) == FILES
        names: dict = {}
        exec((built.path / "_ops.py").read_text(), names)
        assert names["ops"] is getattr(torch.ops, f"_toy_{backend}_{tree}")
        assert names["add_op_namespace_prefix"]("scale") == f"_toy_{backend}_{tree}::scale"


def test_its_metadata_has_what_the_compiled_one_has(both, toy):
    compiled = variant_metadata.read_metadata(both / "torch-stable-abi211-cpu-x86_64-linux")
    for backend in NOARCH_BACKENDS:
        metadata = variant_metadata.read_metadata(both / f"torch-{backend}")
        assert metadata.id == compiled.id.replace("_cpu_", f"_{backend}_")
        assert (str(metadata.backend.backend_type), metadata.backend.archs) == (backend, None)
        assert (metadata.version, metadata.license) == (compiled.version, compiled.license)
        assert metadata.provenance.kernel.commit == compiled.provenance.kernel.commit
        assert set(metadata.digest.files) == FILES - {"metadata.json"}


def test_a_noarch_variant_takes_nothing_from_the_compiled_one(toy):
    """Whichever backend build.toml names first: neither sources nor devices."""
    tables = read_build(toy)
    tables["general"]["backends"] = ["cuda", "cpu"]
    recipe = noarch_recipe(toy, tables, "rocm")
    assert (recipe.sources, recipe.archs, recipe.archs_of, recipe.needs_cutlass) == ((), (), {}, False)
    assert recipe.backend == "rocm" and Path("__init__.py") in recipe.package_files


@pytest.mark.parametrize(("backend", "version"), [("cuda", "cuda"), ("rocm", "hip")])
def test_the_loader_takes_it_for_any_device(both, monkeypatch, backend, version):
    """A variant with architectures is refused on the same devices."""
    monkeypatch.setattr(torch.version, version, "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (3, 5))
    device = type("Device", (), {"gcnArchName": "gfx803:xnack-"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    variant = both / f"torch-{backend}"
    ArchValidator().validate_metadata(metadata=variant_metadata.read_metadata(variant), variant=variant.name)

    content = json.loads((variant / "metadata.json").read_text())
    content["backend"]["archs"] = ["8.0"] if backend == "cuda" else ["gfx90a"]
    (variant / "metadata.json").write_text(json.dumps(content))
    with pytest.raises(RuntimeError, match="does not support the current device"):
        ArchValidator().validate_metadata(metadata=variant_metadata.read_metadata(variant), variant=variant.name)


def test_a_folder_of_both_kinds_is_verified_and_released_as_a_whole(both, toy):
    names = sorted([*NOARCH, "torch-stable-abi211-cpu-x86_64-linux"])
    assert {name: faults(both / name) for name in names} == {name: [] for name in names}
    assert [variant.name for variant in read_release(toy, both).variants] == names
    with (both / "torch-rocm/__init__.py").open("a") as file:
        file.write("more = True\n")
    assert len(faults(both / "torch-rocm")) == 1
    with pytest.raises(ValueError, match=r"torch-rocm: .*__init__\.py"):
        read_release(toy, both)


def test_what_measures_prefers_the_compiled_variant(both, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find_variant(both).name == "torch-stable-abi211-cpu-x86_64-linux"
    shutil.rmtree(both / "torch-stable-abi211-cpu-x86_64-linux")
    assert find_variant(both).name == "torch-cpu"


def test_what_measures_leaves_out_other_machines_variants(both, monkeypatch):
    """Also where their names come first in the folder, as aarch64's does."""
    monkeypatch.setattr(torch.version, "cuda", None)
    here, elsewhere = (both / f"torch-stable-abi211-cpu-{machine}-linux" for machine in ("x86_64", "aarch64"))
    shutil.copytree(here, elsewhere)
    for machine, variant in ("x86_64", here), ("aarch64", elsewhere), ("riscv64", both / "torch-cpu"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert find_variant(both) == variant


def test_the_lab_takes_no_variant_without_a_library(both, monkeypatch):
    """It would measure torch's operations. The one for CUDA is what the folder has for a torch for CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert find_variant(both).name == "torch-cuda"
    assert usable(both, "cuda") is None
