"""AddressSanitizer and UBSan find nothing in the operations of the CPU."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KERNELS = Path("tests/kernels")
LAWS = [
    *("native_ops", "remainder", "stochastic_rounding", "packed_norms", "descended_norms", "quantized_momentum"),
    *("normalize", "move_blocks", "long_lists", "native_gemm", "newton_schulz", "threads", "gemm_vectors"),
]
# Where a defect is planted, what it replaces, and the laws that meet it.
DEFECT = "optimizer_cpu/move_blocks.cpp", "std::memcpy(target, source, size.cols * sizeof(T));", "move_blocks"


@pytest.fixture
def sanitized(repository, tmp_path):
    """Builds the tree of a repository with the sanitizer; returns what runs files of laws by it."""
    # Imported here, because it builds, for which it takes the folder tools/.
    from tests.support.sanitized_variant import MEMORY, build_sanitized_variant, run_sanitized

    if platform.system() != "Linux" or shutil.which("g++") is None:
        pytest.skip("the sanitizer is that of GCC on Linux")

    def sanitized(root: Path, laws: list[str]):
        variant, machine = build_sanitized_variant(root, tmp_path, MEMORY)
        files = [str(KERNELS / f"test_{name}.py") for name in laws]
        return run_sanitized(variant, machine, MEMORY, ["-m", "not slow and not gpu", *files])

    return sanitized


def test_the_sanitizer_finds_nothing(repository, sanitized):
    done = sanitized(repository, LAWS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert " passed" in done.stdout


def test_it_finds_an_access_behind_a_matrix(repository, sanitized, tmp_path):
    source, right, laws = DEFECT
    tree = tmp_path / "tree"
    shutil.copytree(repository, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build", "out"))
    text = (tree / source).read_text()
    assert text.count(right) == 1
    (tree / source).write_text(text.replace(right, right.replace("size.cols", "(size.cols + 1)")))
    done = sanitized(tree, [laws])
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stdout[-2000:] + done.stderr[-4000:]
