"""What may be published: the build of this tree, and none of the builds that somebody has changed."""

from __future__ import annotations

import pytest

from tests.support.attacks.tampered_builds import BUILDS
from tests.support.hub_clients import write_variant
from tests.support.release_trees import BUILD_TOML, COMPILED, add_variant, write_tree
from tools.build.commands import BuildError
from tools.hub.release import read_release
from tools.pins.verify import pin_of


def test_a_changed_file_is_refused(tmp_path):
    tree = write_tree(tmp_path)
    (tree / "build/torch-cpu/_ops.py").write_text("ops = None\n")
    with pytest.raises(ValueError, match=r"torch-cpu: .*_ops\.py"):
        read_release(tree)


def test_another_version_than_that_of_the_tree_is_refused(tmp_path):
    tree = write_tree(tmp_path)
    (tree / "build.toml").write_text(BUILD_TOML.format(version=2))
    with pytest.raises(ValueError, match=r"is of version 1, and build\.toml of 2"):
        read_release(tree)


def provenance(commit: str, dirty: bool) -> dict:
    return {"kernel-builder": {"version": "0"}, "kernel": {"commit": commit, "dirty": dirty}}


def test_variants_of_different_commits_are_no_release(tmp_path):
    tree = write_tree(tmp_path, variants=())
    for name, digit in ("torch-cpu", "a"), ("torch-cuda", "b"):
        add_variant(tree / "build" / name, factor=2, provenance=provenance(digit * 40, dirty=False))
    with pytest.raises(ValueError, match="different commits") as refused:
        read_release(tree)
    named = str(refused.value).splitlines()[-2:]
    assert named == [f"torch-cpu: from commit {'a' * 40}", f"torch-cuda: from commit {'b' * 40}"]


DIRTY = provenance("0" * 40, dirty=True)


@pytest.mark.parametrize("unique_id, metadata", [("0000002_dirty", {}), ("0000002", {"provenance": DIRTY})])
def test_a_dirty_build_needs_permission(tmp_path, unique_id, metadata):
    tree = write_tree(tmp_path)
    variant = write_variant(tree / "build/torch-cpu", unique_id, 2, **metadata)
    with pytest.raises(ValueError, match="torch-cpu: is built from uncommitted changes"):
        read_release(tree)
    assert read_release(tree, allow_dirty=True).variants == (variant,)


@pytest.mark.parametrize("name", ["torch-tpu", COMPILED.replace("cpu", "cu126"), COMPILED.replace("abi211", "abi213")])
def test_a_variant_that_the_page_of_platforms_does_not_have_is_refused(tmp_path, name):
    """Some user's loader would prefer it to the one that the page promises."""
    tree = write_tree(tmp_path, variants=(COMPILED, name))
    with pytest.raises(ValueError, match=f"{name}: is not among the variants of a release, {COMPILED}, "):
        read_release(tree)


def test_a_tree_without_a_build_is_refused(tmp_path):
    with pytest.raises(BuildError, match=r"no variant: run `python -m tools\.build\.variants` first"):
        read_release(write_tree(tmp_path, variants=()))


def test_a_build_without_its_card_is_refused(tmp_path):
    (write_tree(tmp_path) / "build/CARD.md").unlink()
    with pytest.raises(ValueError, match=r"no CARD\.md: run `python -m tools\.build\.variants` first"):
        read_release(tmp_path)


def test_a_release_needs_a_repository(tmp_path):
    tree = write_tree(tmp_path)
    text = (tree / "build.toml").read_text()
    (tree / "build.toml").write_text(text.replace('repo-id = "org/tiny"', ""))
    with pytest.raises(ValueError, match="repo-id"):
        read_release(tree)
    assert read_release(tree, repo_id="org/other").repo_id == "org/other"


def test_the_card_and_the_pins_of_an_untouched_build_are_taken(tmp_path):
    release = read_release(write_tree(tmp_path, variants=(COMPILED, "torch-cpu")))
    assert release.pins == {name: pin_of(tmp_path / "build" / name) for name in ("torch-cpu", COMPILED)}
    assert release.described.startswith("2 variants, 8 files, ")


@pytest.mark.parametrize(
    "said, told",
    [
        ({"id": "_tiny_cpu_fffffff"}, r"has the id _tiny_cpu_fffffff, and _ops\.py another"),
        ({"id": "_other_cpu_0000002", "name": "other"}, "is named other, and build.toml's kernel tiny"),
    ],
)
def test_without_a_library_names_still_have_to_agree(tmp_path, said, told):
    """No digest covers metadata.json: what it says is compared with the code and with build.toml."""
    add_variant(write_tree(tmp_path) / "build/torch-cpu", factor=2, **said)
    with pytest.raises(ValueError, match=f"torch-cpu: {told}"):
        read_release(tmp_path)


# What Python caches is deleted before, and what no digest names is not uploaded.
HARMLESS = {"a library in __pycache__", "bytecode in __pycache__"}


@pytest.mark.parametrize("name, tamper", BUILDS, ids=[name for name, tamper in BUILDS])
def test_a_tampered_build_goes_nowhere(tmp_path, name, tamper):
    tree = write_tree(tmp_path, variants=(COMPILED,))
    original = {path: file.read_bytes() for path, file in read_release(tree).files().items()}
    tamper(tree)
    if name in HARMLESS:
        release = read_release(tree)
        assert {path: file.read_bytes() for path, file in release.files().items()} == original
        assert not [file for file in release.variants[0].rglob("*") if "__pycache__" in file.parent.name]
    else:
        with pytest.raises((ValueError, BuildError)) as refused:
            read_release(tree)
        assert str(tree / "build") in str(refused.value) or COMPILED in str(refused.value)
