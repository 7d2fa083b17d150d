"""What the Hub's builder does with this repository, by a checkout of huggingface/kernels: hooks, CMake, symbols.

make test-builder CHECKOUT=folder
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path

import kernels
import pytest
import torch

from tests.delivery.test_hub_files import NAMED_BY_STRING
from tests.support.builders_copy import copy_as_builder
from tests.support.hub_builder import build, build_noarch, create_pyproject, run_hook
from tools.build import abi_check
from tools.build.commands import run
from tools.build.noarch import NOARCH_BACKENDS
from tools.build.noarch_tree import write_commit
from tools.build.recipe import read_build, read_recipe
from tools.build.released import COMPILED
from tools.build.source_tree import read_revision
from tools.build.variant_metadata import read_metadata
from tools.build.variants import plan
from tools.hub.release import read_release

pytestmark = [pytest.mark.slow, pytest.mark.builder]

PACKAGES = Path("nix-builder/pkgs")
OPS_CHECK = PACKAGES / "torch-ops-check/torch-ops-check-hook.py"
SHIM_VERSIONS = Path("kernel-abi-check/src/torch_stable_abi/shim_function_versions.txt")
OF_BUILD = {"moduleName": "optimizer", "framework": "torch"}


@pytest.fixture(scope="module")
def checkout(request) -> Path:
    folder = request.config.getoption("--checkout")
    if folder is None:
        pytest.skip("needs a checkout of huggingface/kernels: make test-builder CHECKOUT=folder")
    return folder.resolve()


@pytest.fixture(scope="module")
def source(repository, checkout, tmp_path_factory) -> Path:
    """The copy in which the builder builds, called `source` as its hooks expect."""
    source = copy_as_builder(repository, tmp_path_factory.mktemp("builder") / "source")
    create_pyproject(checkout, source)
    return source


@pytest.fixture(scope="module")
def rendered(source) -> Path:
    """The variant for this torch as the builder's CMake makes it."""
    return build(source)


def test_the_hook_for_operators_accepts_the_tree(checkout, source):
    hook = checkout / PACKAGES / "torch-ops-check/torch-ops-check-hook.sh"
    said = run_hook(hook, source.parent, {"python3": sys.prefix, "hook": str(checkout / OPS_CHECK)}, {})
    assert said.startswith("status 0\n"), said


def test_the_hook_for_operators_refuses_a_planted_name(checkout, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/planted.py").write_text('@torch.library.custom_op("optimizer::f")\ndef f(): pass\n')
    hook = checkout / PACKAGES / "torch-ops-check/torch-ops-check-hook.sh"
    said = run_hook(hook, tmp_path, {"python3": sys.prefix, "hook": str(checkout / OPS_CHECK)}, {})
    assert said.startswith("status 1\n") and "planted.py:2 function f" in said


def test_our_rule_knows_every_name_that_the_hook_knows(checkout):
    tree = ast.parse((checkout / OPS_CHECK).read_text())
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert ast.literal_eval(assigned["TORCH_LIBRARY_DECORATORS"].args[0]) <= NAMED_BY_STRING


def test_the_hook_for_the_layout_accepts_the_tree(checkout, source):
    hook = checkout / PACKAGES / "kernel-layout-check/kernel-layout-check-hook.sh"
    said = run_hook(hook, source.parent, {}, OF_BUILD)
    assert said.startswith("status 0\n"), said


def test_the_hook_that_loads_accepts_what_cmake_made(checkout, rendered, tmp_path):
    """It loads where there is no GPU, so importing must not touch one."""
    hook = checkout / PACKAGES / "get-kernel-check/get-kernel-check-hook.sh"
    kernels_folder = str(Path(kernels.__file__).parents[1])
    substitutions = {"python3": sys.executable, "kernels": kernels_folder, "proot": "", "useFakeSys": ""}
    variables = {**OF_BUILD, "out": str(rendered.parent), "CUDA_VISIBLE_DEVICES": ""}
    said = run_hook(hook, tmp_path, substitutions, variables)
    assert said.startswith("status 0\n"), said


def test_what_cmake_made_is_within_the_abi_and_has_our_name(repository, variant, rendered, native_backend, tmp_path):
    (library,) = rendered.glob("*.so")
    violations = abi_check.violations(library, plan(repository, read_build(repository), native_backend, tmp_path))
    # A variant with glibc of this machine, which the builder's own compiler does not have.
    assert not [line for line in violations if not line.startswith(abi_check.MANYLINUX)]
    assert rendered.name == variant.name


def test_no_symbol_is_newer_than_the_stable_abi_by_the_builders_table(checkout, repository, variant, native_backend):
    table = re.findall(r"^(\w+): TORCH_VERSION_(\d+)_(\d+)_\d+$", (checkout / SHIM_VERSIONS).read_text(), re.M)
    introduced = {name: (int(major), int(minor)) for name, major, minor in table}
    abi = read_recipe(repository, read_build(repository), native_backend).torch_abi
    (library,) = variant.glob("*.so")
    needed = set(re.findall(r"\bU (\w+)", run(["nm", "-D", "--undefined-only", library])))
    assert needed & introduced.keys()
    newer = {name for name in needed & introduced.keys() if introduced[name] > tuple(map(int, abi.split(".")))}
    assert not newer


def test_the_builder_can_make_every_compiled_variant_of_a_release(checkout):
    """Its table has the names that variants without the stable ABI have, one for each torch."""
    table = json.loads((checkout / "nix-builder/build-variants.json").read_text())
    for name in COMPILED:
        *_, backend, processor, system = name.split("-")
        names = [each for names in table[f"{processor}-{system}"].values() for each in names]
        assert any(f"-{backend}-" in each for each in names), name


def test_what_it_makes_of_the_second_tree_is_released_with_the_first(repository, checkout, variant, tmp_path):
    write_commit(repository, read_metadata(variant).provenance.kernel.commit, tmp_path / "second")
    made = build_noarch(checkout, tmp_path / "second")
    together = shutil.copytree(variant.parent, tmp_path / "build")
    for each in made:
        each.rename(together / each.name)
    release = read_release(repository, together, allow_dirty=True)
    assert [each.name for each in release.variants] == sorted([variant.name, *(each.name for each in made)])
    assert {each.name for each in made} == {f"torch-{backend}" for backend in NOARCH_BACKENDS}


def test_what_it_makes_of_the_second_tree_trains(repository, checkout, tmp_path):
    """The variant for the backend of this torch, with the names of its operators that the builder's template gives."""
    write_commit(repository, read_revision(repository, ()).commit, tmp_path / "second")
    backend = "cuda" if torch.version.cuda else "cpu"
    (made,) = (each for each in build_noarch(checkout, tmp_path / "second") if each.name == f"torch-{backend}")
    assert len(steps(kernels.get_local_kernel(made))) > 0


def test_what_cmake_made_takes_our_steps_to_the_bit(kernel, rendered):
    theirs = kernels.get_local_kernel(rendered)
    assert theirs.__file__ != kernel.__file__
    for ours, other in zip(steps(kernel), steps(theirs)):
        assert torch.equal(ours, other)


def steps(kernel) -> list[torch.Tensor]:
    """Return matrices and a vector of three dtypes after a few steps of Muon."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"tall": (96, 40), "wide": (40, 160), "bias": (40,)}
    parameters = {
        f"{name}.{dtype}": torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    optimizer = kernel.Muon(list(parameters.items()), lr=0.02)
    for _ in range(3):
        for p in parameters.values():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return [p.detach() for p in parameters.values()]
