"""The loader names modules by the id, so a process that has loaded one folder's code runs it for other folders, too."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.compiled_variants import NAME, OPS
from tests.support.hub_clients import digest_again, environment, run_client
from tools.pins.verify import VerificationError, faults, pin_of, verify

LOAD_BOTH = """
import json, sys
from pathlib import Path
import kernels
from tools.pins.verify import VerificationError, verify

first, second = map(Path, sys.argv[1:3])
first_pin, second_pin = sys.argv[3:]
sides = []
for _ in range(2):
    verify(first, first_pin)
    sides.append(kernels.get_local_kernel(first).shapes.square.SIDES)
try:
    verify(second, second_pin)
    refused = ""
except VerificationError as error:
    refused = str(error)
sides.append(kernels.get_local_kernel(second).shapes.square.SIDES)
print(json.dumps({"sides": sides, "refused": refused}))
"""


def pretend_to_have_loaded(monkeypatch, folder: Path, name: str = OPS, file: str = "__init__.py") -> None:
    module = ModuleType(name)
    module.__file__ = str(folder / file)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def other(copy: Path, tmp_path: Path) -> Path:
    """A folder with the id of `copy` and other code, as intact."""
    other = Path(shutil.copytree(copy, tmp_path / "other" / NAME))
    (other / "shapes/square.py").write_text("SIDES = 5\n")
    digest_again(other)
    return other


def test_the_second_folder_of_an_id_would_run_the_first_ones_code_and_is_refused(copy, other, tmp_path):
    """Here it is loaded all the same: when the loader gives each folder its own modules, the check may go."""
    variables = environment("http://127.0.0.1:9", tmp_path / "home")
    seen = run_client(LOAD_BOTH, [copy, other, pin_of(copy), pin_of(other)], variables)
    assert seen["sides"] == [4, 4, 4]
    told = [f"{other} must not be loaded:", f"  code of this id is loaded from {copy}: start a new process"]
    assert seen["refused"].splitlines() == told


@pytest.mark.parametrize("name, file", [(OPS, "__init__.py"), (f"{OPS}.shapes.square", "shapes/square.py")])
def test_one_module_of_another_folder_is_enough(copy, pin, other, monkeypatch, name, file):
    """The package of an id may be this folder's, and its modules still those of the folder that came first."""
    pretend_to_have_loaded(monkeypatch, copy)
    pretend_to_have_loaded(monkeypatch, other, name, file)
    with pytest.raises(VerificationError, match=f"code of this id is loaded from {(other / file).parent}: start a new"):
        verify(copy, pin)


def test_code_of_a_deleted_folder_still_runs(copy, pin, monkeypatch, tmp_path):
    pretend_to_have_loaded(monkeypatch, tmp_path / "deleted" / NAME)
    with pytest.raises(VerificationError, match="deleted"):
        verify(copy, pin)


def test_what_was_loaded_from_the_same_folder_is_no_fault(copy, pin, monkeypatch):
    pretend_to_have_loaded(monkeypatch, copy)
    pretend_to_have_loaded(monkeypatch, copy, f"{OPS}.shapes.square", "shapes/square.py")
    assert verify(copy, pin) == copy


def test_the_same_folder_by_another_path_is_no_fault(copy, pin, monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(copy.parent)
    pretend_to_have_loaded(monkeypatch, tmp_path / "link" / NAME)
    assert verify(copy, pin) == copy
    pretend_to_have_loaded(monkeypatch, copy)
    assert verify(tmp_path / "link" / NAME, pin) == tmp_path / "link" / NAME


def test_links_to_blobs_are_code_of_the_folder_that_they_are_in(copy, pin, monkeypatch, tmp_path):
    """So are files in the cache of the Hub's client, whose content lies in another folder."""
    variant = tmp_path / "kernels--org--tiny/snapshots" / ("0" * 40) / "build" / NAME
    shutil.copytree(copy, variant)
    blob = tmp_path / "kernels--org--tiny/blobs" / hashlib.sha256((variant / "__init__.py").read_bytes()).hexdigest()
    blob.parent.mkdir()
    (variant / "__init__.py").rename(blob)
    (variant / "__init__.py").symlink_to(os.path.relpath(blob, variant))
    pretend_to_have_loaded(monkeypatch, variant)
    assert verify(variant, pin) == variant


@pytest.mark.parametrize("name", [f"{OPS}1", f"{OPS}_dirty", f"a.{OPS}"])
def test_code_of_other_ids_is_no_fault(copy, pin, other, monkeypatch, name):
    pretend_to_have_loaded(monkeypatch, other, name)
    assert verify(copy, pin) == copy


def test_modules_without_a_file_are_no_fault(copy, pin, monkeypatch):
    monkeypatch.setitem(sys.modules, OPS, None)
    monkeypatch.setitem(sys.modules, f"{OPS}.shapes", ModuleType("shapes"))
    assert verify(copy, pin) == copy


def test_faults_are_those_of_the_folder_alone(copy, pin, other, monkeypatch):
    pretend_to_have_loaded(monkeypatch, other)
    assert faults(copy, pin) == []
