"""tools/pins/hf_home.py: what prefetch does with an output that holds something, without a Hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx2
import pytest
from rich.console import Console

from tests.support.pinned_kernels import pins_of, write_tiny
from tools.pins import prefetch
from tools.pins.hf_home import PrefetchError, move_into, repository, snapshot_of, write_reference
from tools.pins.pins_file import Pins, write_pins

NAMES = ("torch-cpu",)
CONSOLE = Console(stderr=True)


@pytest.fixture
def pins(tmp_path):
    """The pins of a variant that is in `release`/build of the same folder."""
    build = write_tiny(tmp_path / "release", {"torch-cpu": 2})
    return Pins("org/tiny", "a" * 40, pins_of(build))


def fill(home: Path, pins: Pins, factor: int = 2) -> Path:
    """Write what `fetch` makes of a release into `home`; by another factor it is not what the pins say."""
    write_tiny(home / snapshot_of(pins), {"torch-cpu": factor})
    write_reference(home, pins, NAMES)
    return home


@pytest.fixture
def fetched(monkeypatch):
    """Revisions that were fetched; instead of asking a Hub, the variant is written."""
    revisions = []

    def fetch(pins: Pins, names, home: Path, console: Console) -> None:
        revisions.append(pins.revision)
        fill(home, pins)

    monkeypatch.setattr(prefetch, "fetch", fetch)
    return revisions


def reference(home: Path, pins: Pins) -> Path:
    return home / repository(pins) / "refs/v0"


def test_a_reference_that_is_missing_or_of_another_revision_is_written_again(pins, tmp_path, fetched):
    output = tmp_path / "models"
    assert prefetch.prefetch(pins, NAMES, output, CONSOLE)
    for spoil in (Path.unlink, lambda file: shutil.rmtree(file.parent), lambda file: file.write_text("b" * 40)):
        spoil(reference(output, pins))
        assert not prefetch.prefetch(pins, NAMES, output, CONSOLE)
        assert reference(output, pins).read_text() == pins.revision
    assert fetched == [pins.revision]
    assert {path.name for path in (output / repository(pins)).rglob("*") if "refs" in path.parts} == {"refs", "v0"}


def test_a_reference_is_replaced_as_a_whole(pins, tmp_path, monkeypatch):
    """Somebody who reads it meanwhile, or after the process was stopped, has the old one."""
    home = fill(tmp_path / "models", pins)
    reference(home, pins).write_text("b" * 40)

    def stopped(file: Path, target: Path):
        assert (file.read_text(), target.read_text()) == (pins.revision, "b" * 40)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_reference(home, pins, NAMES)
    assert [path.name for path in (home / repository(pins)).glob("**/*v0*")] == ["v0"]
    assert reference(home, pins).read_text() == "b" * 40


def test_a_variant_beside_build_is_named(pins, tmp_path, fetched):
    """The loader would take it instead of those in build."""
    output = fill(tmp_path / "models", pins)
    write_tiny(tmp_path / "forged", {"torch-cpu": 3})
    shutil.move(tmp_path / "forged/build/torch-cpu", output / snapshot_of(pins) / "torch-cpu")
    with pytest.raises(PrefetchError, match="exists and differs: torch-cpu lies beside build; delete it"):
        prefetch.prefetch(pins, NAMES, output, CONSOLE)


def test_a_folder_that_lacks_a_variant_is_told_not_to_grow(pins, tmp_path, fetched):
    output = fill(tmp_path / "models", pins)
    with pytest.raises(PrefetchError, match="exists without torch-cuda, and cannot be extended: delete it and fetch"):
        prefetch.prefetch(pins, (*NAMES, "torch-cuda"), output, CONSOLE)
    assert fetched == []


@pytest.mark.parametrize("name", ["models", "models.tar.gz"])
def test_a_link_to_nothing_is_refused_before_anything_is_fetched(pins, tmp_path, fetched, name):
    (tmp_path / name).symlink_to("absent")
    with pytest.raises(PrefetchError, match=f"{name} is a link to absent, which is not there"):
        prefetch.prefetch(pins, NAMES, tmp_path / name, CONSOLE)
    assert fetched == []


@pytest.fixture
def faster(monkeypatch):
    """Let another process fill the output, by this factor, while the present one fetches."""

    def beat(output: Path, factor: int) -> None:
        def fetch(pins: Pins, names, home: Path, console: Console) -> None:
            fill(home, pins)
            fill(output, pins, factor)
            reference(output, pins).unlink()

        monkeypatch.setattr(prefetch, "fetch", fetch)

    return beat


def test_another_process_that_was_faster_with_the_same_is_no_error(pins, tmp_path, faster):
    output = tmp_path / "models"
    faster(output, 2)
    assert not prefetch.prefetch(pins, NAMES, output, CONSOLE)
    assert reference(output, pins).read_text() == pins.revision
    assert {path.name for path in tmp_path.iterdir()} == {"models", "release"}


def test_another_process_that_was_faster_with_something_else_is_named(pins, tmp_path, faster):
    output = tmp_path / "models"
    faster(output, 3)
    with pytest.raises(PrefetchError, match=r"exists and differs: metadata\.json has"):
        prefetch.prefetch(pins, NAMES, output, CONSOLE)


def test_a_move_that_fails_otherwise_says_why(pins, tmp_path, monkeypatch):
    def full(file: Path, target: Path):
        raise OSError(28, "No space left on device")

    home = fill(tmp_path / "home", pins)
    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left on device"):
        move_into(home, pins, NAMES, tmp_path / "models")


@pytest.mark.parametrize(
    "error", [ImportError("'socksio' is not installed"), httpx2.InvalidURL("no port"), httpx2.ConnectError("gone")]
)
def test_a_proxy_or_an_address_that_the_client_cannot_use_is_one_line(pins, tmp_path, monkeypatch, capsys, error):
    def asked(*arguments, **options):
        raise error

    monkeypatch.setattr(prefetch.HfApi, "list_repo_tree", asked)
    write_pins(tmp_path / "pins.json", pins)
    options = ["--pins", str(tmp_path / "pins.json"), "--output", str(tmp_path / "models")]
    assert prefetch.main(["org/tiny", "--revision", pins.revision, *options]) == 1
    assert capsys.readouterr() == ("", f"tools.pins.prefetch: {error}\n")
