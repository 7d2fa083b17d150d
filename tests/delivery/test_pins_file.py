"""tools/pins/pins_file.py, and what publish and rollback do if the pins cannot be read or written."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from tests.support.release_trees import add_variant, write_tree
from tools.hub import publish, rollback
from tools.hub.server import Hub
from tools.pins.pins_file import KERNEL, read_pins


@pytest.mark.parametrize("text", ["[" * 200_000, '{"repo-id": ' * 200_000])
def test_a_file_that_is_nested_deeply_is_no_file_of_pins(tmp_path, text):
    (tmp_path / "pins.json").write_text(text)
    with pytest.raises(ValueError, match=r"pins\.json is no file of pins: RecursionError"):
        read_pins(tmp_path / "pins.json", "org/tiny")


@pytest.fixture
def publisher(tmp_path, monkeypatch, capsys):
    """A tree to publish from, a client, and how to run the commands on both: status, output and errors."""
    tree = write_tree(tmp_path / "tree")
    monkeypatch.setattr(publish, "ROOT", tree)
    monkeypatch.setattr(rollback, "ROOT", tree)
    with Hub(tmp_path / "hub") as hub:

        def run(tool, *options: object) -> tuple[int, str, str]:
            words = ["--repo-id", "org/tiny", "--endpoint", hub.endpoint, *options]
            monkeypatch.setattr(sys, "argv", [tool.__name__, *map(str, words)])
            return tool.main(), *capsys.readouterr()

        yield SimpleNamespace(tree=tree, run=run, api=HfApi(endpoint=hub.endpoint, token=False))


def head(publisher) -> str:
    refs = publisher.api.list_repo_refs("org/tiny", **KERNEL).branches
    return {ref.name: ref.target_commit for ref in refs}["v1"]


@pytest.mark.parametrize(
    "file, words",
    [("absent/pins.json", "needs the folder {folder}/absent, which is not there"), ("", "is a folder")],
)
def test_pins_that_can_go_nowhere_stop_publishing_before_it_begins(publisher, tmp_path, file, words):
    status, said, error = publisher.run(publish, "--pins", tmp_path / file)
    assert (status, said) == (1, "") and words.format(folder=tmp_path) in error and len(error.splitlines()) == 1
    with pytest.raises(RepositoryNotFoundError):
        publisher.api.list_repo_refs("org/tiny", **KERNEL)


@pytest.mark.parametrize("file", ["absent/pins.json", ""])
def test_pins_that_can_go_nowhere_stop_a_rollback_before_it_begins(publisher, tmp_path, file):
    status, said, error = publisher.run(rollback, "--to", "a" * 40, "--pins", tmp_path / file)
    assert (status, said) == (1, "") and error.startswith(f"tools.hub.rollback: --pins {tmp_path}")


def test_an_error_while_pins_are_written_loses_neither_the_commit_nor_the_pins(publisher, tmp_path, monkeypatch):
    """The report is on the terminal already."""

    def full(*arguments):
        raise OSError(28, "No space left on device")

    file = tmp_path / "pins.json"
    publisher.run(publish, "--pins", file)
    pins = read_pins(file, "org/tiny")
    monkeypatch.setattr(publish, "write_pins", full)
    monkeypatch.setattr(rollback, "write_pins", full)
    add_variant(publisher.tree / "build/torch-cpu", factor=3)
    for tool, options in (publish, ()), (rollback, ("--to", pins.revision)):
        status, said, error = publisher.run(tool, *options, "--pins", file)
        assert status == 1 and "No space left" in error
        assert f"commit {head(publisher)}" in said and "  torch-cpu, pin " in said
    assert f"  torch-cpu, pin {pins.variants['torch-cpu']}" in said
