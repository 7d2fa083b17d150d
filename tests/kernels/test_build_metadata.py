"""The package knows what the builder wrote about it."""

import importlib
import json
from pathlib import Path

import pytest


@pytest.fixture
def build_metadata(kernel, monkeypatch):
    module = importlib.import_module(f"{kernel.__name__}.kernels.build_metadata")
    yield module
    monkeypatch.undo()
    module.read_metadata.cache_clear()


def test_it_is_what_the_file_beside_the_code_says(kernel, build_metadata):
    beside = Path(kernel.__file__).with_name("metadata.json")
    assert build_metadata.read_metadata() == json.loads(beside.read_text())
    assert build_metadata.read_metadata()["name"] == "optimizer"


def test_a_tree_that_no_builder_has_seen_says_nothing(build_metadata, monkeypatch, tmp_path):
    monkeypatch.setattr(build_metadata, "FILE", tmp_path / "metadata.json")
    build_metadata.read_metadata.cache_clear()
    assert build_metadata.read_metadata() == {}


FILES = [("code.py", True), ("folder/code.py", True), ("ops.so", True), ("ops.pyd", True), ("page.md", False)]


@pytest.mark.parametrize("name, counts", FILES)
def test_measurements_are_of_one_library_and_one_code(kernel, build_metadata, monkeypatch, tmp_path, name, counts):
    """On every system: Windows has libraries of another name."""
    machine = kernel.kernels.speeds.machine
    for module in (build_metadata, machine):
        monkeypatch.setattr(module, "VARIANT", tmp_path)
    digests = set()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for content in (b"one", b"another"):
        (tmp_path / name).write_bytes(content)
        digests.add(machine.kernels_digest.__wrapped__())
    (tmp_path / name).rename((tmp_path / name).with_stem("renamed"))
    digests.add(machine.kernels_digest.__wrapped__())
    assert len(digests) == 1 + 2 * counts


def test_measurements_hold_wherever_a_variant_lies_and_in_whichever_order_its_files_are_listed(
    kernel, monkeypatch, tmp_path
):
    machine, digests = kernel.kernels.speeds.machine, set()
    for folder, names in (tmp_path / "one", ("a.so", "b.so")), (tmp_path / "another", ("b.so", "a.so")):
        folder.mkdir()
        files = [folder / name for name in names]
        for file in files:
            file.write_text(file.name)
        monkeypatch.setattr(machine, "VARIANT", folder)
        monkeypatch.setattr(machine, "libraries", lambda files=files: files)
        digests.add(machine.kernels_digest.__wrapped__())
    assert len(digests) == 1
