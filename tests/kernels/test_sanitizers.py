"""GCC finds nothing wrong in the operations of the CPU: no bad access, no data race, no name with two definitions."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

KERNELS = Path("tests/kernels")
PASSES = ("native_ops", "packed_norms", "descended_norms", "quantized_momentum", "normalize", "move_blocks")
PRODUCTS = ("native_gemm", "newton_schulz", "threads")


class Defect(NamedTuple):
    """Where one is planted, what it replaces by what, the laws that meet it, and what the sanitizer may call it."""

    source: str
    right: str
    wrong: str
    laws: str
    names: tuple[str, ...]


# What each sanitizer watches: files of laws, and a defect that it must find.
WATCHED = {
    "memory": (
        (*PASSES, *PRODUCTS, "remainder", "stochastic_rounding", "long_lists", "gemm_vectors"),
        Defect(
            "optimizer_cpu/move_blocks.cpp",
            "std::memcpy(target, source, size.cols * sizeof(T));",
            "std::memcpy(target, source, (size.cols + 1) * sizeof(T));",
            "move_blocks",
            ("heap-buffer-overflow",),
        ),
    ),
    "threads": (
        (*PASSES, *PRODUCTS),
        Defect(
            "optimizer_cpu/threads.cpp",
            "const auto all_out = [&] { return inside_ == 0; };",
            "const auto all_out = [&] { return true; };",
            "newton_schulz",
            (
                "data race",
                "ThreadSanitizer: SEGV",
            ),  # the memory may be gone before a thread writes into it
        ),
    ),
}
watched = pytest.mark.parametrize("name", WATCHED)


@pytest.fixture
def variants():
    """The module that builds variants with sanitizers."""
    # Imported here, because it builds, for which it takes the folder tools/.
    from tests.support import sanitized_variant

    if platform.system() != "Linux" or shutil.which("g++") is None:
        pytest.skip("the sanitizers are those of GCC on Linux")
    return sanitized_variant


@pytest.fixture
def sanitized(variants, tmp_path):
    """Builds the tree of a repository with a sanitizer; returns what runs files of laws by it."""

    def sanitized(root: Path, name: str, laws):
        sanitizer = variants.SANITIZERS[name]
        variant, machine = variants.build_sanitized_variant(root, tmp_path, sanitizer)
        files = [str(KERNELS / f"test_{file}.py") for file in laws]
        return variants.run_sanitized(variant, machine, sanitizer, ["-m", "not slow and not gpu", *files])

    return sanitized


def changed(repository: Path, tree: Path, source: str, change: Callable[[str], str]) -> Path:
    """Return a copy of the repository with a change in one file, or in all files of one folder."""
    shutil.copytree(repository, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build", "out"))
    place = tree / source
    for file in sorted(place.iterdir()) if place.is_dir() else [place]:
        file.write_text(change(file.read_text()))
    return tree


@watched
def test_the_sanitizer_finds_nothing(repository, sanitized, name):
    laws, _ = WATCHED[name]
    done = sanitized(repository, name, laws)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert " passed" in done.stdout


@watched
def test_it_finds_a_planted_defect(repository, sanitized, tmp_path, name):
    _, defect = WATCHED[name]
    assert (repository / defect.source).read_text().count(defect.right) == 1
    tree = changed(repository, tmp_path / "tree", defect.source, lambda text: text.replace(defect.right, defect.wrong))
    done = sanitized(tree, name, [defect.laws])
    assert done.returncode != 0, done.stdout[-2000:]
    assert any(name in done.stderr for name in defect.names), done.stdout[-2000:] + done.stderr[-4000:]


def test_a_name_has_one_definition_in_the_library(repository, variants, tmp_path):
    variants.build_sanitized_variant(repository, tmp_path, variants.ONE_DEFINITION)


def test_a_second_definition_of_a_name_is_refused(repository, variants, tmp_path):
    tree = changed(repository, tmp_path / "tree", "optimizer_cpu", lambda text: text.replace("MatrixSlice", "Place"))
    with pytest.raises(Exception, match=r"(?s)Place.* violates .* a different type is defined"):
        variants.build_sanitized_variant(tree, tmp_path, variants.ONE_DEFINITION)
