"""A variant that is not what was built is recognized, and each differing file is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.toy_kernel import write_toy_kernel
from tools.build import variants, verify


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    (built,) = variants.build_variants(write_toy_kernel(folder / "toy"), ["cpu"], folder / "out")
    return built.path


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "build" / original.name)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    def run(folder: Path) -> tuple[int, list[str]]:
        status = verify.main([str(folder)])
        captured = capsys.readouterr()
        return status, (captured.out + captured.err).splitlines()

    return run


def test_built_variant_is_intact(variant, printed):
    status, lines = printed(variant)
    metadata = json.loads((variant / "metadata.json").read_text())
    assert status == 0
    (line,) = lines
    assert line.startswith(f"{variant.name}: intact; {metadata['id']}, from commit ")
    assert metadata["provenance"]["kernel"]["commit"] in line
    assert line.endswith("uncommitted changes") == metadata["provenance"]["kernel"]["dirty"]


def test_changed_file_is_named(copy, printed):
    with (copy / "_ops.py").open("a") as file:
        file.write("\n")
    status, lines = printed(copy)
    assert status == 1
    assert len(lines) == 2 and "changed" in lines[0] and "mismatch for _ops.py" in lines[1]


def test_added_file_is_named(copy, printed):
    (copy / "data/more.py").touch()
    status, lines = printed(copy)
    assert (status, lines[1:]) == (1, ["  Unknown file: data/more.py"])


def test_removed_file_is_named(copy, printed):
    (copy / "data/sizes.json").unlink()
    status, lines = printed(copy)
    assert (status, lines[1:]) == (1, ["  Missing file: data/sizes.json"])


def test_bytecode_left_by_loading_is_ignored(copy, printed):
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__/__init__.cpython-311.pyc").touch()
    assert printed(copy)[0] == 0


def test_missing_digest_fails(copy, printed):
    metadata = json.loads((copy / "metadata.json").read_text())
    del metadata["digest"], metadata["provenance"]
    (copy / "metadata.json").write_text(json.dumps(metadata))
    status, lines = printed(copy)
    assert status == 1
    assert "from an unknown commit" in lines[0] and "has no digest" in lines[1]


@pytest.mark.parametrize("text", ["", '{"name": ', "{}", "\0"])
def test_broken_metadata_gives_a_one_line_error(copy, printed, text):
    (copy / "metadata.json").write_text(text)
    status, lines = printed(copy)
    assert status == 1
    assert len(lines) == 1 and lines[0].startswith(f"{copy.name}/metadata.json: ")


def test_every_variant_of_a_build_folder_is_verified(copy, printed):
    other = shutil.copytree(copy, copy.parent / "torch-universal")
    (other / "__init__.py").unlink()
    status, lines = printed(copy.parent)
    assert status == 1
    assert [line.split(";")[0] for line in lines if ";" in line] == [f"{copy.name}: intact", f"{other.name}: changed"]


def test_variant_without_metadata_fails(copy, printed):
    (copy / "metadata.json").unlink()
    status, lines = printed(copy.parent)
    assert (status, len(lines)) == (1, 1)
    assert f"{copy.name}/metadata.json" in lines[0]


def test_folder_without_variants_fails(tmp_path, printed):
    status, lines = printed(tmp_path)
    assert (status, len(lines)) == (1, 1)
