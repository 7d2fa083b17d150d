"""The tree from which the Hub's builder makes the variants without a library, and that they are one release's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tomllib
from kernels._rust import Build

from tests.delivery.test_noarch import FILES, build_noarch, contents
from tests.support.hub_clients import environment, run_client
from tests.support.noarch_builder import build_noarch_tree
from tests.support.toy_kernel import commit, git
from tools.build import card, noarch_tree
from tools.build.commands import BuildError
from tools.build.noarch import NOARCH_BACKENDS
from tools.build.recipe import read_build
from tools.build.variants import build_variants
from tools.hub.release import read_release
from tools.hub.server import Hub

COMPILED = "torch-stable-abi211-cpu-x86_64-linux"
NAMES = sorted([COMPILED, *(f"torch-{backend}" for backend in NOARCH_BACKENDS)])
CLIENT = """
import json, sys
from pathlib import Path
from tests.support.feigned_platforms import in_forks, loaded_variant
from tools.hub.publish import publish
from tools.hub.release import read_release
from tools.pages.platforms import NEW, PLATFORMS

commit = publish(read_release(Path(sys.argv[1]), Path(sys.argv[2]))).commit
calls = [(machine, machine.backends[0], NEW[-1], "org/toy", commit) for machine in PLATFORMS[:3:2]]
print(json.dumps([machine.name for machine, *_ in calls] + in_forks(loaded_variant, calls)))
"""


@pytest.fixture
def toy(toy) -> Path:
    """The toy with all that a tree may hold."""
    edited = (
        (toy / "build.toml").read_text().replace("version = 3", 'version = 3\nsource = "https://example.org/\\"toy"')
    )
    (toy / "build.toml").write_text(edited)
    for name in ("tests/test_toy.py", "tests/golden/toy.npz", "benchmarks/benchmark.py", "benchmarks/sweep.py"):
        (toy / name).parent.mkdir(parents=True, exist_ok=True)
        (toy / name).write_text(f"# {name}\n")
    (toy / "flake.nix").write_text("{ }\n")
    (toy / "CARD.md").write_text("{{ repo_id }} {{ version }} {{ functions }} {{ source }} {{ has_benchmark }}\n")
    (toy / "torch-ext/toy/_ops.py").write_text("stale = True\n")
    commit(toy)
    return toy


@pytest.fixture
def tree(toy, tmp_path) -> Path:
    noarch_tree.write_tree(toy, tmp_path / "tree")
    return tmp_path / "tree"


def head(root: Path) -> str:
    return git(root, "rev-parse", "HEAD").strip()


def second(toy: Path, folder: Path) -> Path:
    """Return the repository with the second tree, of the toy's newest commit."""
    noarch_tree.write_commit(toy, head(toy), folder)
    return folder


def test_the_second_tree_is_of_the_same_package_and_version(toy, tree):
    """The Hub's parser reads it, and the card says the same: uploading either tree replaces the other's card."""
    first, other = (tomllib.loads((root / "build.toml").read_text()) for root in (toy, tree))
    assert other["general"] == {**first["general"], "backends": list(NOARCH_BACKENDS)}
    assert other["torch-noarch"] == {"pyext": first["torch"]["pyext"]}
    assert set(other) == {"general", "torch-noarch"}
    assert list(map(str, Build.open(tree).general.backends)) == list(NOARCH_BACKENDS)
    package = Path("torch-ext/toy")
    assert card.fill_card(tree, other, package) == card.fill_card(toy, first, package)


def test_the_second_tree_has_the_package_and_what_the_builder_reads_beside_it(toy, tree, tmp_path):
    beside = {"tests/test_toy.py", "tests/golden/toy.npz", "benchmarks/benchmark.py", "CARD.md", "flake.nix"}
    files = contents(tree)
    package = {name.removeprefix("torch-ext/toy/"): data for name, data in files.items() if name.startswith("torch-")}
    assert set(files) == {f"torch-ext/toy/{name}" for name in package} | beside | {"build.toml"}
    assert all(files[name] == (toy / name).read_bytes() for name in beside)
    built = contents(build_noarch(toy, tmp_path / "out")[0].path)
    assert package == {name: built[name] for name in FILES - {"_ops.py", "metadata.json"}}


def test_a_second_tree_is_not_mixed_with_other_files(toy, tree):
    with pytest.raises(BuildError, match="has to be empty"):
        noarch_tree.write_tree(toy, tree)
    with pytest.raises(BuildError, match="not an empty directory"):
        noarch_tree.write_commit(toy, head(toy), tree)


def test_a_second_tree_that_the_parser_refuses_is_told(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(noarch_tree, "NOARCH_BACKENDS", ("cpu", "abacus"))
    with pytest.raises(BuildError, match=r"build\.toml: .*abacus"):
        noarch_tree.write_tree(toy, tmp_path / "tree")
    with pytest.raises(BuildError, match="abacus"):
        second(toy, tmp_path / "clone")
    assert not (tmp_path / "clone").exists()


def test_this_repository_has_a_second_tree(repository, tmp_path):
    noarch_tree.write_tree(repository, tmp_path / "tree")
    general = tomllib.loads((tmp_path / "tree/build.toml").read_text())["general"]
    assert general == {**read_build(repository)["general"], "backends": list(NOARCH_BACKENDS)}


def test_its_commit_is_one_more_than_the_first_ones_and_always_the_same(toy, tmp_path, monkeypatch):
    """Whatever time it is, whoever makes it, and whatever git is told about names and the ends of lines."""
    made = noarch_tree.write_commit(toy, head(toy), tmp_path / "once")
    (tmp_path / ".gitconfig").write_text(
        "[user]\nname = another\nemail = a@b\n[core]\nautocrlf = true\nsafecrlf = false\n"
    )
    for name, value in {"HOME": str(tmp_path), "TZ": "Asia/Kolkata"}.items():
        monkeypatch.setenv(name, value)
    assert noarch_tree.write_commit(toy, head(toy), tmp_path / "again") == made
    assert noarch_tree.commit_made_of(toy, head(toy)) == made
    once = tmp_path / "once"
    assert git(once, "rev-parse", "noarch", "noarch^").split() == [made, head(toy)]
    assert git(once, "status", "--porcelain", "--branch").splitlines() == ["## noarch"]
    noarch_tree.write_tree(toy, tmp_path / "tree")
    for clone in once, tmp_path / "again":
        files = {file: data for file, data in contents(clone).items() if not file.startswith(".git/")}
        assert files == contents(tmp_path / "tree")


def test_what_is_not_committed_is_not_in_it(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(noarch_tree, "ROOT", toy)
    monkeypatch.setattr("sys.argv", ["noarch_tree", "--output", str(tmp_path / "out")])
    (toy / "torch-ext/toy/__init__.py").write_text("changed = True\n")
    assert noarch_tree.main() == 1 and "uncommitted changes" in capsys.readouterr().err
    commit(toy)
    (toy / "stray").touch()
    assert noarch_tree.main() == 0 and git(tmp_path / "out", "rev-parse", "noarch^").strip() in capsys.readouterr().out
    assert noarch_tree.main() == 1
    assert len(capsys.readouterr().err.splitlines()) == 2  # git's words are the second


@pytest.fixture
def both(toy, tmp_path) -> Path:
    """A folder with the toy's compiled variant, and those without a library that the Hub's builder made."""
    build_variants(toy, ["cpu"], tmp_path / "both")
    build_noarch_tree(second(toy, tmp_path / "second"), tmp_path / "both")
    return tmp_path / "both"


def test_variants_of_both_trees_are_one_release(toy, both):
    release = read_release(toy, both)
    assert [variant.name for variant in release.variants] == NAMES
    assert release.commit == head(toy)


def test_they_are_published_together_and_each_machine_takes_its_own(toy, both, tmp_path):
    with Hub(tmp_path / "hub", trusted=["org"]) as hub:
        done = run_client(CLIENT, [toy, both], environment(hub.endpoint, tmp_path / "home"))
    assert done == [
        "Linux on x86-64 with torch for CPUs",
        "Linux on x86-64 with torch for CUDA 12.6, 12.8 or 12.9",
        COMPILED,
        "torch-cuda",
    ]


def edited(tree: Path) -> None:
    with (tree / "torch-ext/toy/__init__.py").open("a") as file:
        file.write("more = True\n")
    commit(tree)


def amended(tree: Path) -> None:
    """The same files with another message: nobody but its author knows what the commit is."""
    git(tree, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--amend", "--message", "another")


@pytest.mark.parametrize("change", [edited, amended])
def test_another_commit_than_the_one_that_is_made_is_refused(toy, both, tmp_path, change):
    """Also with the right parent."""
    other = second(toy, tmp_path / "other")
    change(other)
    shutil.rmtree(both / "torch-rocm")
    build_noarch_tree(other, tmp_path / "built")
    (tmp_path / "built/torch-rocm").rename(both / "torch-rocm")
    with pytest.raises(ValueError, match="variants of different commits, which would be one release"):
        read_release(toy, both)


def test_the_second_tree_of_another_commit_is_refused(toy, both, tmp_path):
    (toy / "notes.txt").touch()
    commit(toy)
    for variant in build_noarch_tree(second(toy, tmp_path / "newer"), tmp_path / "built"):
        shutil.rmtree(both / variant.name)
        variant.rename(both / variant.name)
    with pytest.raises(ValueError, match="variants of different commits") as refused:
        read_release(toy, both)
    assert f"{COMPILED}: from commit {git(toy, 'rev-parse', 'HEAD^').strip()}" in str(refused.value)


def test_a_repository_without_the_commit_cannot_tell(toy, both, tmp_path):
    """As one of which only the newest commit was fetched."""
    git(toy, "checkout", "--quiet", "--orphan", "new")
    commit(toy)
    git(tmp_path, "clone", "--quiet", "--single-branch", f"file://{toy}", tmp_path / "clone")
    with pytest.raises(ValueError, match=r"it cannot be told whether they have the same sources: commit .* fetch it"):
        read_release(tmp_path / "clone", both)


def test_a_compiled_variant_of_the_second_commit_is_refused(toy, both, tmp_path):
    """Its commit has no sources of a library."""
    made, metadata = noarch_tree.commit_made_of(toy, head(toy)), both / COMPILED / "metadata.json"
    metadata.write_text(metadata.read_text().replace(head(toy), made))
    (both / "torch-cpu/metadata.json").write_text(
        (both / "torch-cpu/metadata.json").read_text().replace(made, head(toy))
    )
    with pytest.raises(ValueError, match="variants of different commits"):
        read_release(toy, both)
