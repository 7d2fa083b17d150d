"""GCC's sanitizers find nothing in the operations of the CPU: no bad access, no undefined behaviour, no data race."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

KERNELS = Path("tests/kernels")
PASSES = ("native_ops", "packed_norms", "descended_norms", "quantized_momentum", "normalize", "move_blocks")
PRODUCTS = ("native_gemm", "newton_schulz", "threads")


class Defect(NamedTuple):
    """Where one is planted, what it replaces by what, the laws that meet it, and the sanitizer's word for it."""

    source: str
    right: str
    wrong: str
    laws: str
    word: str


# What each sanitizer watches: files of laws, and a defect that it must find.
WATCHED = {
    "memory": (
        (*PASSES, *PRODUCTS, "remainder", "stochastic_rounding", "long_lists", "gemm_vectors"),
        Defect(
            "optimizer_cpu/move_blocks.cpp",
            "std::memcpy(target, source, size.cols * sizeof(T));",
            "std::memcpy(target, source, (size.cols + 1) * sizeof(T));",
            "move_blocks",
            "heap-buffer-overflow",
        ),
    ),
    "threads": (
        (*PASSES, *PRODUCTS),
        Defect(
            "optimizer_cpu/threads.cpp",
            "const auto all_out = [&] { return inside_ == 0; };",
            "const auto all_out = [&] { return true; };",
            "newton_schulz",
            "data race",
        ),
    ),
}
watched = pytest.mark.parametrize("name", WATCHED)


@pytest.fixture
def sanitized(tmp_path):
    """Builds the tree of a repository with a sanitizer; returns what runs files of laws by it."""
    # Imported here, because it builds, for which it takes the folder tools/.
    from tests.support.sanitized_variant import SANITIZERS, build_sanitized_variant, run_sanitized

    if platform.system() != "Linux" or shutil.which("g++") is None:
        pytest.skip("the sanitizers are those of GCC on Linux")

    def sanitized(root: Path, name: str, laws):
        variant, machine = build_sanitized_variant(root, tmp_path, SANITIZERS[name])
        files = [str(KERNELS / f"test_{file}.py") for file in laws]
        return run_sanitized(variant, machine, SANITIZERS[name], ["-m", "not slow and not gpu", *files])

    return sanitized


@watched
def test_the_sanitizer_finds_nothing(repository, sanitized, name):
    laws, _ = WATCHED[name]
    done = sanitized(repository, name, laws)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert " passed" in done.stdout


@watched
def test_it_finds_a_planted_defect(repository, sanitized, tmp_path, name):
    _, defect = WATCHED[name]
    tree = tmp_path / "tree"
    shutil.copytree(repository, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build", "out"))
    text = (tree / defect.source).read_text()
    assert text.count(defect.right) == 1
    (tree / defect.source).write_text(text.replace(defect.right, defect.wrong))
    done = sanitized(tree, name, [defect.laws])
    assert done.returncode != 0 and defect.word in done.stderr, done.stdout[-2000:] + done.stderr[-4000:]
