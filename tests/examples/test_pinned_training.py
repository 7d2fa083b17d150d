"""The project of examples/pinned_training, as a user keeps it: copied out of here, with a repository of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomllib
import torch

from tests.support.pinned_kernels import commented, counting, publish
from tests.support.rank_pool import REPO_ID, local_kernels
from tools.hub import server
from tools.hub.client_environment import client_environment

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/pinned_training"
SNAPSHOTS = "hub/kernels--org--optimizer/snapshots"


@dataclass(frozen=True)
class SeenHub:
    """Where a Hub is, which revisions it has, and what was asked of it."""

    endpoint: str
    revisions: list[str]
    requests: list[tuple[str, str]]

    def asked(self, kind: str) -> list[str]:
        """Return the paths that were read, of a `tree`, a listing of all files, or of a file to `resolve`."""
        return [path for method, path in self.requests if method == "GET" and f"/{kind}/" in path]


@pytest.fixture(scope="module")
def hub(kernel, tmp_path_factory) -> Iterator[SeenHub]:
    """A Hub with two revisions of the package; `requests` has the method and path of each request to it."""
    folder, requests = tmp_path_factory.mktemp("hub"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "application", counting(server.application, requests))
        with server.Hub(folder / "hub") as running:
            revisions = [
                publish(running.endpoint, REPO_ID, commented(kernel, folder / note, note))
                for note in ("first", "second")
            ]
            yield SeenHub(running.endpoint, revisions, requests)


class Project:
    """A copy of the example, and a user of a Hub with a cache of theirs."""

    def __init__(self, folder: Path, hub: SeenHub):
        self.folder, self.home, self.hub = folder / "project", folder / "home", hub
        if not self.folder.exists():
            shutil.copytree(EXAMPLE, self.folder, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, *command: object, **variables: str) -> subprocess.CompletedProcess:
        environment = {**client_environment(self.hub.endpoint, self.home), "OMP_NUM_THREADS": "1", **variables}
        environment.pop("PYTHONPATH", None)
        command = [sys.executable, *map(str, command)]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    def said(self, *command: object, **variables: str) -> str:
        """Return what a command prints that succeeds."""
        done = self.run(*command, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def refusal(self, *command: object, **variables: str) -> str:
        """Return what a command prints that refuses to train."""
        done = self.run(*command, **variables)
        assert done.returncode == 1 and "Loaded" not in done.stdout, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    def git(self, *words: str) -> None:
        identity = ("-c", "user.name=User", "-c", "user.email=user@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *words], cwd=self.folder, capture_output=True, check=True, timeout=60)

    def variant(self, revision: str) -> Path:
        (variant,) = (self.home / SNAPSHOTS / revision / "build").iterdir()
        return variant


@pytest.fixture
def project(hub, tmp_path) -> Project:
    return Project(tmp_path, hub)


@pytest.fixture(scope="module")
def pinned_once(hub, tmp_path_factory) -> Path:
    """The folder of a project that has pinned the first revision, and of its user's home, which stay as they are."""
    folder = tmp_path_factory.mktemp("pinned")
    Project(folder, hub).said("upgrade.py", hub.revisions[0])
    return folder


@pytest.fixture
def pinned(hub, pinned_once, tmp_path) -> Project:
    """A project that has pinned the first revision."""
    for name in ("project", "home"):
        shutil.copytree(pinned_once / name, tmp_path / name, symlinks=True)
    return Project(tmp_path, hub)


OFFLINE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}


def test_placeholders_pin_nothing(project):
    assert "placeholder" in project.refusal("train.py")


def test_what_upgrade_writes_is_what_the_hub_has(pinned):
    revision = pinned.hub.revisions[0]
    pins = json.loads((pinned.folder / "optimizer.pins.json").read_text())
    (lock,) = json.loads((pinned.folder / "kernels.lock").read_text())
    assert lock == {"dependency": {"repo-id": REPO_ID, "version": 0}, "lock": {"commit": revision}}
    assert (pins["repo-id"], pins["revision"]) == (REPO_ID, revision)
    assert list(pins["variants"]) == [pinned.variant(revision).name]


@pytest.mark.usefixtures("loaded_by_default")
def test_it_starts_and_goes_on_offline_bit_for_bit(pinned):
    """After the first start neither the Hub nor a network is needed; a run in two parts ends where one run does."""
    shutil.rmtree(pinned.home)  # another machine than the one where it was pinned
    assert "Step 3: loss" in pinned.said("train.py", "--steps", 3)
    resumed = pinned.said("train.py", "--steps", 3, **OFFLINE)
    whole = pinned.said("train.py", "--steps", 6, "--checkpoint", "whole.pt", **OFFLINE)
    assert "Continuing at step 3" in resumed and "another build" not in resumed
    parts, one = (torch.load(pinned.folder / file, weights_only=True) for file in ("checkpoint.pt", "whole.pt"))
    assert all(torch.equal(parts["model"][name], one["model"][name]) for name in one["model"])
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.usefixtures("loaded_by_default")
def test_other_code_is_refused_before_it_runs(pinned):
    """A tampered cache, and LOCAL_KERNELS, which overrides a pinned commit without a word."""
    elsewhere = f"{REPO_ID}={local_kernels()[REPO_ID]}"
    assert "LOCAL_KERNELS is set" in pinned.refusal("train.py", LOCAL_KERNELS=elsewhere)
    code = pinned.variant(pinned.hub.revisions[0]) / "__init__.py"
    content = code.read_text()
    code.resolve().write_text(f"raise SystemExit('foreign code runs')\n{content}")
    said = pinned.refusal("train.py", **OFFLINE)
    assert "must not be loaded" in said and "__init__.py" in said and "foreign" not in said


def test_files_that_disagree_are_refused(pinned):
    lock = pinned.folder / "kernels.lock"
    lock.write_text(lock.read_text().replace(pinned.hub.revisions[0], pinned.hub.revisions[1]))
    assert "name different revisions" in pinned.refusal("train.py", **OFFLINE)


@pytest.mark.slow
def test_an_upgrade_is_a_commit_and_so_is_the_way_back(project):
    """The newest revision is pinned where none is named; a checkpoint says which build has written it."""
    first, second = project.hub.revisions
    project.said("upgrade.py", first)
    project.git("init")
    project.git("add", ".")
    project.git("commit", "-m", "Pin the first")
    builds = [project.said("train.py", "--steps", 1).splitlines()[0]]
    assert second in project.said("upgrade.py")
    project.git("commit", "-am", "Upgrade the optimizer")
    upgraded = project.said("train.py", "--steps", 1)
    project.git("revert", "--no-edit", "HEAD")
    back = project.said("train.py", "--steps", 1, **OFFLINE)
    assert second in project.said("upgrade.py", second)  # which has left bytecode when it was loaded
    builds += [said.splitlines()[0] for said in (upgraded, back)]
    assert builds[0] == builds[2] != builds[1]
    assert f"is of another build: {builds[0].removeprefix('Loaded ')}" in upgraded
    assert f"is of another build: {builds[1].removeprefix('Loaded ')}" in back


def test_without_the_hub_nothing_is_pinned(project):
    assert "nothing is pinned" in project.refusal("upgrade.py", "a" * 40, **OFFLINE)
    assert (project.folder / "kernels.lock").read_text() == (EXAMPLE / "kernels.lock").read_text()


def test_a_revision_with_faults_is_not_pinned(project, kernel, tmp_path):
    build = commented(kernel, tmp_path / "bad", "bad")
    (variant,) = build.iterdir()
    (variant / "more.py").write_text("")
    with server.Hub(tmp_path / "hub") as running:
        revision = publish(running.endpoint, REPO_ID, build)
        project.hub = SeenHub(running.endpoint, [revision], [])
        assert "more.py" in project.refusal("upgrade.py", revision)
    assert (project.folder / "kernels.lock").read_text() == (EXAMPLE / "kernels.lock").read_text()


def torchrun(processes: int, *more: str) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--nproc-per-node", str(processes), *more, "train.py", "--steps", "1")


@pytest.mark.slow
def test_of_eight_processes_one_downloads(pinned):
    shutil.rmtree(pinned.home)
    pinned.hub.requests.clear()
    assert "Step 1: loss" in pinned.said(*torchrun(8, "--standalone"))
    downloads, variant = pinned.hub.asked("resolve"), pinned.variant(pinned.hub.revisions[0])
    files = {file for file in variant.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert len(downloads) == len(set(downloads)) == len(files)
    assert len(pinned.hub.asked("tree")) == 1


@pytest.mark.slow
def test_nodes_without_a_common_disk_download_each(pinned, tmp_path):
    """Two nodes of two processes; each node has a cache of its own, and all four train together."""
    shutil.rmtree(pinned.home)
    pinned.hub.requests.clear()
    address = ("--master-addr", "127.0.0.1", "--master-port", "29577", "--nnodes", "2")
    nodes = []
    for node in range(2):
        command = [sys.executable, *torchrun(2, *address, "--node-rank", str(node))]
        environment = client_environment(pinned.hub.endpoint, tmp_path / f"node {node}")
        nodes.append(
            subprocess.Popen(
                command, cwd=pinned.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "Step 1: loss" in said[0]
    downloads = pinned.hub.asked("resolve")
    assert {downloads.count(path) for path in downloads} == {2} == {len(pinned.hub.asked("tree"))}
    for node in range(2):
        assert (tmp_path / f"node {node}" / SNAPSHOTS / pinned.hub.revisions[0]).is_dir()


@pytest.mark.slow
def test_what_fails_on_one_process_ends_all(pinned):
    """None waits for a kernel that another one could not download, and the reason is printed once."""
    shutil.rmtree(pinned.home)
    done = pinned.run(*torchrun(2, "--standalone"), **OFFLINE)
    assert done.returncode == 1
    assert done.stdout.count("train.py: ") == 1 and "Loaded" not in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="links")
def test_the_examples_verification_is_the_tools(repository):
    assert (EXAMPLE / "verify.py").resolve() == repository / "tools/pins/verify.py"


def test_the_example_names_every_package_that_it_imports():
    files = {file.stem: file.read_text() for file in EXAMPLE.glob("*.py")}
    imported = set(re.findall(r"^(?:import|from) (\w+)", "\n".join(files.values()), re.MULTILINE))
    needed = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["dependencies"]
    assert imported - sys.stdlib_module_names - {*files} == {re.match(r"\w+", each)[0] for each in needed}
