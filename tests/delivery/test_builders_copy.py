"""The tests that the Hub's builder runs are collected and pass in a copy of what it copies, by what its Python has."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.builders_copy import PYPROJECT, copy_as_builder, link_packages

# What the builder's tests may take. It is CPU time, because other processes do not change it, and of one thread: where
# others want the cores, threads that wait for each other spin.
SECONDS, ONE_THREAD = 60, {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def copy(repository, tmp_path_factory) -> Path:
    copy = copy_as_builder(repository, tmp_path_factory.mktemp("copy") / "source")
    (copy / "pyproject.toml").write_text(PYPROJECT)
    return copy


@pytest.fixture(scope="module")
def packages(repository, tmp_path_factory) -> Path:
    return link_packages(repository, tmp_path_factory.mktemp("packages") / "python")


def run_tests(copy: Path, folders: list[Path], **variables: str) -> subprocess.CompletedProcess:
    """Run what the builder runs in its copy, with nothing but `folders` and Python's own library on the path."""
    inherited = {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(map(str, folders)), **variables}
    command = [sys.executable, "-S", "-m", "pytest", copy / "tests", "-m", "kernels_ci", "-p", "no:cacheprovider"]
    options = ["-q", "-W", "error::pytest.PytestUnknownMarkWarning", *([] if variables else ["--collect-only"])]
    return subprocess.run([*command, *options], cwd=copy.parent, env=environment, capture_output=True, text=True)


def test_the_copy_has_neither_tools_nor_settings(copy):
    assert {path.name for path in copy.iterdir()} == {
        *("build.toml", "pyproject.toml", "torch-ext", "tests"),
        *("optimizer_common", "optimizer_cpu", "optimizer_cuda"),
    }
    assert {path.suffix for path in (copy / "tests").rglob("*") if path.is_file()} == {".py", ".json"}


def test_they_are_collected_and_cover_every_part(copy, packages):
    done = run_tests(copy, [packages])
    assert done.returncode == 0, done.stdout + done.stderr
    folders = {line.split("/")[-2] for line in done.stdout.splitlines() if "::" in line}
    assert folders == {"kernels", "math", "muon", "rules", "wrappers"}


@pytest.mark.slow
def test_they_pass_in_time_with_the_variant_on_the_path(copy, packages, variant):
    """The builder puts the variant first, where its folder kernels/ hides the Hub's package of that name."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_tests(copy, [variant, packages], LOCAL_KERNELS=f"org/optimizer={variant.parent}", **ONE_THREAD)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS
