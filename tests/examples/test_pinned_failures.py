"""What examples/pinned_training does when something fails: it says what, and loads and pins nothing."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.pinned_kernels import write_tiny

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/pinned_training"
MODULES = "kernel", "train", "upgrade", "verify"


@pytest.fixture
def example(tmp_path, monkeypatch) -> dict[str, ModuleType]:
    """The example's modules by their names; its two files are copies in `tmp_path`."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = {name: importlib.import_module(name) for name in MODULES}
    for constant in "LOCK", "PINS":
        file = getattr(modules["kernel"], constant)
        (tmp_path / file.name).write_text(file.read_text())
        for module in modules["kernel"], modules["upgrade"]:
            monkeypatch.setattr(module, constant, tmp_path / file.name)
    yield modules
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_an_error_without_words_is_a_failure(example):
    """As Python's MemoryError is one: whoever took silence for success would load what was not verified."""

    def fail() -> None:
        raise MemoryError

    with pytest.raises(example["kernel"].PinError, match=r"^MemoryError$"):
        example["kernel"].on_every_process(fail)


def test_a_node_where_nobody_downloads_is_named(example, monkeypatch):
    """As where a launcher sets LOCAL_RANK to the rank among all processes."""
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(example["kernel"].PinError, match=r"^no process of node 1 has LOCAL_RANK=0"):
        example["kernel"].load_kernel()


@pytest.mark.parametrize("content", ["[]", "[{}]", "{", '[{"dependency": 1}]', "[" * 100_000])
def test_a_damaged_lock_is_named(example, content):
    example["kernel"].LOCK.write_text(content)
    for read in example["kernel"].read_pinned, example["upgrade"].read_dependency:
        with pytest.raises(example["kernel"].PinError, match=r"kernels\.lock .*is damaged"):
            read()


def test_a_revision_without_variants_is_not_pinned(example, tmp_path, monkeypatch):
    (tmp_path / "build").mkdir()
    monkeypatch.setattr(example["upgrade"], "download", lambda *_: tmp_path)
    before = example["kernel"].PINS.read_text()
    with pytest.raises(example["verify"].VerificationError, match="no variants"):
        example["upgrade"].upgrade("a" * 40)
    assert example["kernel"].PINS.read_text() == before and json.loads(before)["variants"] == {}


@pytest.mark.parametrize("version", [{"version": 1}, {}], ids=str)
def test_a_revision_of_another_version_or_of_none_is_not_pinned(example, tmp_path, monkeypatch, version):
    metadata = write_tiny(tmp_path, {"torch-cpu": 2}) / "torch-cpu/metadata.json"
    content = json.loads(metadata.read_text())
    del content["version"]
    metadata.write_text(json.dumps(content | version))
    monkeypatch.setattr(example["upgrade"], "download", lambda *_: tmp_path)
    said = rf"is of version {version.get('version')}, and kernels\.lock asks for 0"
    with pytest.raises(example["verify"].VerificationError, match=said):
        example["upgrade"].upgrade("a" * 40)


def test_a_full_disk_leaves_both_files_as_they_were(example, tmp_path, monkeypatch):
    write_tiny(tmp_path, {"torch-cpu": 2})
    monkeypatch.setattr(example["upgrade"], "download", lambda *_: tmp_path)
    files, write_text = (example["kernel"].LOCK, example["kernel"].PINS), Path.write_text

    def full(path: Path, content: str) -> int:
        if path.name == files[1].name:
            raise OSError(28, "No space left on device")
        return write_text(path, content)

    monkeypatch.setattr(Path, "write_text", full)
    before = [file.read_text() for file in files]
    with pytest.raises(OSError, match="No space left"):
        example["upgrade"].upgrade("a" * 40)
    assert [file.read_text() for file in files] == before
    assert {path.name for path in tmp_path.iterdir()} == {"build", *(file.name for file in files)}


def test_what_the_client_refuses_is_told_without_a_traceback(example, monkeypatch, capsys):
    lock = example["kernel"].LOCK
    lock.write_text(lock.read_text().replace("org/optimizer", "an org/optimizer"))
    monkeypatch.setattr(sys, "argv", ["upgrade.py"])
    assert example["upgrade"].main() == 1
    assert capsys.readouterr().out.startswith("upgrade.py: nothing is pinned: Repo id must")


def test_a_run_without_a_step_is_refused(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "0"])
    with pytest.raises(SystemExit):
        example["train"].main()
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err
