"""A variant has the bytes that its commit builds, wherever that is; one that has others is named, with its files."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.toy_kernel import commit, git, write_toy_kernel
from tools.build import compilers, machines, rebuild, variants
from tools.build.commands import run
from tools.build.source_tree import clone_at

needs_nvcc = pytest.mark.skipif(compilers.find_nvcc() is None, reason="there is no nvcc")
BACKENDS = ["cpu", pytest.param("cuda", marks=needs_nvcc)]
# A kernel in a namespace without a name, and a header's constant in another: nvcc makes names for both.
UNNAMED = """\
#include <cuda/std/tuple>

namespace {
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
}  // namespace

void launch(float* x) { twice<<<1, 32>>>(x); }
"""


@pytest.fixture(scope="module")
def toy(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with this repository's tools.build, of which each commit has its own."""
    root = write_toy_kernel(tmp_path_factory.mktemp("rebuild") / "toy")
    (root / "toy_cuda/toy.cu").write_text(UNNAMED)
    (root / "tools").mkdir()
    shutil.copyfile(repository / "tools/__init__.py", root / "tools/__init__.py")
    shutil.copytree(repository / "tools/build", root / "tools/build", ignore=shutil.ignore_patterns("__pycache__"))
    (root / ".gitignore").write_text("__pycache__\n")
    commit(root)
    return root


@pytest.fixture(scope="module", autouse=True)
def first_builds_are_not_imported() -> Iterator[None]:
    """Importing takes seconds. A variant is built again by a process of its own, which imports what it has built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "load", lambda variant, job: "nothing")
        yield


@pytest.fixture(scope="module")
def built(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (variant,) = variants.build_variants(toy, ["cpu"], tmp_path_factory.mktemp("build"))
    return variant.path


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "build" / built.name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_variant_has_the_bytes_of_its_commit_in_another_folder(toy, backend, tmp_path, capsys):
    (variant,) = variants.build_variants(toy, [backend], tmp_path / "out")
    assert rebuild.main([str(tmp_path / "out")], toy) == 0, capsys.readouterr()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{variant.path.name}: the same bytes as from commit ")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_package_has_the_same_bytes_in_two_clones(repository, backend, tmp_path, capsys):
    """All of its sources, with everything for which compilers make names or keep paths."""
    clone, output = tmp_path / "a-folder-of-another-length", tmp_path / "out"
    clone_at(repository, git(repository, "rev-parse", "HEAD").strip(), clone)
    run([sys.executable, "-m", "tools.build.variants", "--backend", backend, "--output", output], cwd=clone)
    assert rebuild.main([str(output)], repository) == 0, capsys.readouterr()


def test_a_variant_is_built_again_for_its_own_machine(toy, copy, tmp_path, monkeypatch):
    """By a cross compiler, with the torch of that machine that this repository has and its clone has not."""
    other, asked = copy.rename(copy.with_name("torch-stable-abi211-cpu-aarch64-linux")), []
    monkeypatch.setattr(rebuild, "run", lambda command, cwd: asked.append((command, cwd)))
    (tmp_path / "work").mkdir()
    with pytest.raises(variants.BuildError, match="is no compiled variant"):  # nothing was built
        rebuild.rebuild(other, toy, tmp_path / "work")
    ((command, clone),) = asked
    assert command[command.index("--machine") + 1] == "aarch64"
    assert (clone / "out/torch").readlink() == machines.FOREIGN_TORCHES


def test_files_that_the_commit_does_not_build_are_named(toy, copy, capsys):
    (library,) = copy.glob("*.so")
    library.write_bytes(library.read_bytes() + b"\0")
    (copy / "data/sizes.json").unlink()
    (copy / "more.py").touch()
    assert rebuild.main([str(copy)], toy) == 1
    first, *files = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{copy.name}: other bytes than from commit ")
    named = {f"{library.name} has other bytes", "data/sizes.json is missing", "more.py is not built"}
    assert {line.strip() for line in files} == named


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ({"commit": "0" * 40, "dirty": True}, "was built with uncommitted changes: no commit has its files"),
        ({"commit": "0" * 40, "dirty": False}, f"commit {'0' * 40} is not in .*: fetch it"),
        (None, "names no commit"),
    ],
    ids=str,
)
def test_what_no_commit_builds_is_refused_by_name(toy, copy, kernel, said, tmp_path):
    file = copy / "metadata.json"
    metadata = json.loads(file.read_text())
    metadata["provenance"]["kernel"] = kernel
    if kernel is None:
        del metadata["provenance"]["kernel"]
    file.write_text(json.dumps(metadata))
    (tmp_path / "work").mkdir()
    with pytest.raises(variants.BuildError, match=f"{copy.name}:? {said}"):
        rebuild.rebuild(copy, toy, tmp_path / "work")


def test_a_folder_without_compiled_variants_says_so(tmp_path, capsys):
    (tmp_path / "torch-cpu").mkdir()
    assert rebuild.main([str(tmp_path)]) == 1
    assert "is no compiled variant (it has no library) and holds none" in capsys.readouterr().err
