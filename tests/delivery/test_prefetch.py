"""tools/pins/prefetch.py: what it fetches loads with the Hub gone, wherever it is carried, and is what was pinned.

Most processes are forks of one that has imported torch. A fetch, a refusal and a load start as users start them.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.attacks.forked_clients import Clients
from tests.support.hub_clients import environment, run_tool
from tests.support.pinned_kernels import CALLED, ELSEWHERE, HERE, WAYS, loaded, publish, released
from tools.hub.server import Hub
from tools.pins.verify import faults

ROOT = Path(__file__).resolve().parents[2]
REPO_ID = "org/tiny"
SNAPSHOTS = "hub/kernels--org--tiny/snapshots"
NOBODY = 65534


@pytest.fixture(scope="module")
def clients():
    with Clients(CALLED) as opened:
        yield opened


@pytest.fixture(scope="module")
def world(clients):
    """A Hub that is gone again, two releases that were on it, and what was fetched: of the first, all and one."""
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are for one user, and here another one reads
        folder = Path(name)
        folder.chmod(0o755)
        with Hub(folder / "hub") as hub:
            variables = environment(hub.endpoint, folder / "home")
            first = released(hub.endpoint, folder / "first", {HERE: 2, ELSEWHERE: 3})
            second = released(hub.endpoint, folder / "second", {HERE: 5})
            for output, release, options in (
                ("all", first, ()),
                ("both", first, ()),
                ("both", second, ()),
                ("back", first, ()),
                ("back", second, ()),
                ("back", first, ()),
                ("one", first, ("--variant", HERE)),
                ("user", first, ()),
                ("all.tar.gz", first, ()),
                ("again.tar.gz", first, ()),
            ):
                forking = clients if output != "again.tar.gz" else None
                done = fetch(forking, release, folder / output, variables, *options)
                assert done.returncode == 0, done.stderr
        releases = {"first": first, "second": second}
        yield SimpleNamespace(**releases, folder=folder, clients=clients, variables=variables, said=done.stdout)


def fetch(clients, release, output: Path, variables, *options: str) -> subprocess.CompletedProcess:
    """Fetch in a fork of `clients`; None stands for a process as a user starts it."""
    asked = (REPO_ID, "--revision", release.revision, "--pins", release.pins, "--output", output, *options)
    run = clients.run_tool if clients else functools.partial(run_tool, ROOT)
    return run("tools.pins.prefetch", *asked, variables=variables)


def read(world, home: Path, *ways: str, user: int = 0, offline: str = "1", forks=True) -> list[float]:
    """Return by what the kernel multiplies that loads in each way from `home`; user 0 is the present one."""
    variables, revision = {**world.variables, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline}, world.first.revision
    arguments = user, revision, str(world.first.lock), str(home / SNAPSHOTS / revision), ways
    return loaded(world.clients if forks else None, variables, *arguments)


def verified(home: Path, release) -> subprocess.CompletedProcess:
    """Verify all variants of a release in `home`, as its receiver does."""
    build = home / SNAPSHOTS / release.revision / "build"
    command = [sys.executable, ROOT / "tools/pins/verify.py", build, "--pins", release.pins]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_it_loads_with_the_hub_gone(world):
    assert read(world, world.folder / "all", *WAYS, forks=False) == [2] * len(WAYS)


def test_three_ways_need_not_be_told_that_there_is_no_network(world):
    assert read(world, world.folder / "all", "load", "plain", "installed", offline="0") == [2] * 3


def test_one_variant_is_enough(world):
    (variant,) = (world.folder / "one" / SNAPSHOTS / world.first.revision / "build").iterdir()
    assert variant.name == HERE
    assert read(world, world.folder / "one", *WAYS) == [2] * len(WAYS)


def test_by_default_it_has_every_pinned_variant_and_nothing_else(world):
    snapshot = world.folder / "all" / SNAPSHOTS / world.first.revision
    assert [path.name for path in snapshot.iterdir()] == ["build"]
    assert {path.name for path in (snapshot / "build").iterdir()} == {HERE, ELSEWHERE}
    assert {path.name for path in (world.folder / "all/hub/kernels--org--tiny").iterdir()} == {"snapshots", "refs"}


def test_two_revisions_share_a_folder(world):
    """The version is that of the last one, and pins reach both."""
    assert read(world, world.folder / "both", "revision", "load", "plain", "version") == [2, 2, 2, 5]


def test_the_version_is_that_which_was_fetched_last_though_it_was_there(world):
    assert read(world, world.folder / "back", "version") == [2]


def test_it_can_be_verified_where_it_is(world):
    for name, release in (("all", world.first), ("both", world.first), ("both", world.second)):
        done = verified(world.folder / name, release)
        assert done.returncode == 0 and "intact" in done.stdout, done.stdout
    assert verified(world.folder / "all", world.second).returncode != 0


@pytest.fixture
def unpacked(world, tmp_path):
    """What the receiver of an archive has."""
    (tmp_path / "models").mkdir()
    subprocess.run(["tar", "xzf", world.folder / "all.tar.gz", "-C", tmp_path / "models"], check=True)
    return tmp_path / "models"


def test_an_unpacked_archive_loads_and_can_be_verified(world, unpacked):
    assert verified(unpacked, world.first).returncode == 0
    assert read(world, unpacked, *WAYS) == [2] * len(WAYS)


def test_an_archive_of_the_same_has_the_same_bytes(world):
    assert (world.folder / "all.tar.gz").read_bytes() == (world.folder / "again.tar.gz").read_bytes()
    assert "tar xzf again.tar.gz" in world.said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_loads_it_and_leaves_nothing(world):
    """Modes stop nobody from reading, and Python finds no place for bytecode."""
    assert read(world, world.folder / "user", *WAYS, user=NOBODY) == [2] * len(WAYS)
    assert faults(world.folder / "user" / SNAPSHOTS / world.first.revision / "build" / HERE, None) == []


def test_everybody_may_read_it_and_nobody_write(world):
    build = world.folder / "all" / SNAPSHOTS / world.first.revision / "build"
    for path in (world.folder / "all").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        readable = 0o555 if path.is_dir() else 0o444
        assert mode & 0o777 == (readable if path.is_relative_to(build) else readable | stat.S_IWUSR), path
        assert not path.is_symlink()


@pytest.mark.parametrize("carry", [["cp", "-r"], ["cp", "-rL"], ["mv"]], ids=["cp", "cp -L", "mv"])
def test_it_may_be_carried_away(world, tmp_path, carry):
    """What arrives has the same files, for there is no link; and by another way than an archive it loads as well."""
    source = shutil.copytree(world.folder / "all", tmp_path / "source")
    subprocess.run([*carry, source, tmp_path / "elsewhere"], check=True)
    assert verified(tmp_path / "elsewhere", world.first).returncode == 0
    assert contents(tmp_path / "elsewhere") == contents(world.folder / "all")


def contents(home: Path) -> dict[str, bytes]:
    return {path.relative_to(home).as_posix(): path.read_bytes() for path in home.rglob("*") if path.is_file()}


@pytest.fixture
def online(world, tmp_path):
    """A Hub with a release, for what is fetched anew."""
    with Hub(tmp_path / "hub") as hub:
        release = released(hub.endpoint, tmp_path / "release", {"torch-cpu": 7})
        yield release, environment(hub.endpoint, tmp_path / "home")


def refusal(done: subprocess.CompletedProcess, folder: Path, before: list[Path]) -> str:
    """Return what a refusal says, after checking that it left nothing."""
    assert done.returncode == 1 and not done.stdout
    assert sorted(folder.iterdir()) == before
    return done.stderr.splitlines()[0] if "must not be loaded" not in done.stderr else done.stderr


def test_fetching_again_changes_nothing(clients, online, tmp_path):
    release, variables = online
    for _ in range(2):
        assert fetch(clients, release, tmp_path / "models", variables).returncode == 0
    variant = tmp_path / "models" / SNAPSHOTS / release.revision / "build/torch-cpu/__init__.py"
    variant.chmod(0o644)
    variant.write_text("raise SystemExit")
    done = fetch(clients, release, tmp_path / "models", variables)
    assert done.returncode == 1 and "exists and differs: __init__.py" in done.stderr
    assert variant.read_text() == "raise SystemExit"


def test_a_tampered_download_is_refused(online, tmp_path):
    """What the Hub gives out under the pinned commit has code in it that the publisher has not pinned."""
    release, variables = online
    (release.build / "torch-cpu/__init__.py").write_text("raise SystemExit")
    tampered = publish(variables["HF_ENDPOINT"], REPO_ID, release.build)
    wrong_pins(release, revision=tampered)
    release.revision = tampered
    before = sorted(tmp_path.iterdir())
    said = refusal(fetch(None, release, tmp_path / "models", variables), tmp_path, before)
    assert "must not be loaded" in said and "__init__.py" in said


def wrong_pins(release, **changes) -> None:
    release.pins.write_text(json.dumps({**json.loads(release.pins.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes, options, words",
    [
        ({"revision": "a" * 40}, (), "is for org/tiny " + "a" * 40),
        ({"repo-id": "org/other"}, (), "is for org/other"),
        ({"variants": {}}, (), "no pin for any variant"),
        ({"variants": 3}, (), "is no file of pins"),
        ({}, ("--variant", "torch-rocm"), "no pin for torch-rocm"),
        ({"variants": {"torch-rocm": "0" * 64}}, (), "has no torch-rocm, only torch-cpu"),
        ({"variants": {"torch-cpu": "zero"}}, (), "zero"),
    ],
)
def test_wrong_pins_are_named(clients, online, tmp_path, changes, options, words):
    release, variables = online
    wrong_pins(release, **changes)
    before = sorted(tmp_path.iterdir())
    assert words in refusal(fetch(clients, release, tmp_path / "models", variables, *options), tmp_path, before)


@pytest.mark.parametrize(
    "case, words",
    [
        ("short", "40 hexadecimal digits"),
        ("absent", "Revision Not Found"),
        ("offline", "offline"),
        ("file", "neither a folder nor"),
        ("archive", "exists already"),
        ("parent", "there is no folder"),
    ],
)
def test_other_mistakes_are_named_in_a_line(clients, online, tmp_path, case, words):
    release, variables = online
    output = tmp_path / {"archive": "there.tar.gz", "file": "there", "parent": "absent/models"}.get(case, "models")
    if case in ("file", "archive"):
        output.touch()
    if case in ("short", "absent"):
        release.revision = {"short": release.revision[:12], "absent": "a" * 40}[case]
        wrong_pins(release, revision=release.revision)
    if case == "offline":
        variables = {**variables, "HF_HUB_OFFLINE": "1"}
    before = sorted(tmp_path.iterdir())
    done = fetch(clients, release, output, variables)
    assert words.lower() in refusal(done, tmp_path, before).lower(), done.stderr
    assert len(done.stderr.splitlines()) == 1
