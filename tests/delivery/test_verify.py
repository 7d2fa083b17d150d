"""tools/pins/verify.py: what a pin is, what it is refused for by name, and what a second start finds."""

from __future__ import annotations

import hashlib
import operator
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.compiled_variants import NAME
from tests.support.hub_clients import write_variant
from tools.build import variants
from tools.pins.verify import VerificationError, backend_of, faults, pin_of, verify


def test_a_pin_is_the_sha256_of_the_metadata(copy):
    assert pin_of(copy) == hashlib.sha256((copy / "metadata.json").read_bytes()).hexdigest()


def test_what_is_as_pinned_gives_its_folder(copy, pin):
    assert verify(copy, pin) == verify(str(copy), {NAME: pin}) == copy
    assert faults(copy) == faults(copy, pin) == faults(copy, {NAME: pin, "torch-cuda": "0" * 64}) == []


def test_a_relative_path_gives_an_absolute_folder(copy, pin, monkeypatch):
    monkeypatch.chdir(copy)
    assert verify(".", pin) == copy


@pytest.mark.parametrize("wrong", ["0" * 64, "", None, b"pin", ["pin"], 7, {}, {"torch-cpu": "0" * 64}, {NAME: None}])
def test_another_pin_or_none_is_refused(copy, pin, wrong):
    with pytest.raises(VerificationError, match=r"(the pin is|has no pin)"):
        verify(copy, wrong)
    assert wrong is None or faults(copy, wrong)


def test_what_the_builder_of_this_repository_makes_has_no_faults(toy, tmp_path):
    """The digest is made by the Hub's parser, and read here by the standard library."""
    (built,) = variants.build_variants(toy, ["cpu"], tmp_path / "out")
    assert faults(built.path) == []
    assert verify(built.path, pin_of(built.path)) == built.path


def test_the_package_has_no_faults(variant):
    assert verify(variant, pin_of(variant)) == variant


EXPECTED = {
    "scaling.py": "is not what the digest says",
    "more.py": "is not in the digest",
    "shapes/square.py": "is missing",
    "more": "is not in the digest",
    "shapes/more.pyc": "is bytecode outside of __pycache__",
    "data.json": "is a link to",
}


def test_every_fault_is_told_by_name_in_a_line(copy, pin):
    (copy / "scaling.py").write_text("scale = None\n")
    (copy / "more.py").touch()
    (copy / "shapes/square.py").unlink()
    (copy / "more/inside").mkdir(parents=True)
    (copy / "shapes/more.pyc").touch()
    (copy / "data.json").unlink()
    (copy / "data.json").symlink_to("/etc/passwd")
    lines = faults(copy, pin)
    assert len(lines) == len(EXPECTED)
    for name, words in EXPECTED.items():
        assert len([line for line in lines if line.startswith(f"{name} {words}")]) == 1
    with pytest.raises(VerificationError) as refused:
        verify(copy, pin)
    assert str(refused.value).splitlines() == [f"{copy} must not be loaded:", *(f"  {line}" for line in lines)]


def test_a_name_cannot_forge_a_line(copy, pin):
    (copy / "a\nintact\x1b[2J").touch()
    (copy / os.fsdecode(b"\xff")).touch()
    lines = faults(copy, pin)
    assert len(lines) == 2 and all(line.isascii() and line.isprintable() for line in lines)


def test_many_ranks_verify_and_write_bytecode_at_once(copy, pin):
    """Each deletes what the others write: none may take a missing file for a fault."""

    def start(rank: int) -> Path:
        for source in ("__init__", "scaling", "_ops"):
            (copy / "__pycache__").mkdir(exist_ok=True)
            (copy / f"__pycache__/{source}.cpython-311.pyc.{rank}").touch()
        return verify(copy, pin)

    with ThreadPoolExecutor(8) as ranks:
        assert list(ranks.map(start, range(200))) == [copy] * 200


def test_another_variant_beside_it_needs_a_pin_too(copy, pin):
    other = write_variant(copy.parent / "torch-cpu", "0000002", 2)
    (copy.parent / "torch-notes").mkdir()
    assert faults(copy) == []
    assert faults(copy, pin) == ["torch-cpu lies beside it without a pin, and the loader might prefer it"]
    assert verify(copy, {NAME: pin, "torch-cpu": pin_of(other)}) == copy


def test_a_variant_above_the_build_needs_a_pin_of_that_place(copy, pin):
    """Of a folder with both the loader takes the variant above `build`, whatever is pinned inside."""
    build = copy.parent / "snapshot/build"
    build.mkdir(parents=True)
    inside = copy.rename(build / NAME)
    assert faults(inside, pin) == []
    (build.parent / NAME).mkdir()
    assert faults(inside, pin) == [f"../{NAME} lies beside it without a pin, and the loader might prefer it"]


def test_a_cache_is_examined_in_python_3_9_where_parents_cannot_be_sliced(copy, pin, tmp_path, monkeypatch):
    variant = tmp_path / "kernels--org--tiny/snapshots" / ("0" * 40) / "build" / NAME
    shutil.copytree(copy, variant)
    kind = type(variant.parents)
    item = kind.__getitem__
    # As in 3.9, whose comparison of a slice with 0 is a TypeError.
    monkeypatch.setattr(kind, "__getitem__", lambda self, place: item(self, operator.index(place)))
    assert verify(variant, pin) == variant


def test_a_signature_may_lie_beside_the_metadata(copy, pin):
    (copy / "metadata.json.sigstore").write_text("{}")
    assert faults(copy, pin) == []
    with (copy / "metadata.json.sigstore").open("wb") as large:
        large.truncate(2**20 + 1)
    assert faults(copy, pin) == ["metadata.json.sigstore is not a regular file of at most 1048576 bytes"]


@pytest.mark.parametrize(
    "name, backend",
    [
        (NAME, "cpu"),
        ("torch-stable-abi211-cu130-aarch64-linux", "cuda"),
        ("torch213-cxx11-rocm72-x86_64-linux", "rocm"),
        ("torch-stable-abi211-xpu20253-x86_64-windows", "xpu"),
        ("tvm-ffi01-metal-aarch64-darwin", "metal"),
        ("torch-cuda", "cuda"),
        ("torch-npu", "cann"),
        ("torch-ext", None),
        ("torch-stable-abi211-cpu", None),
        (f"{NAME}\n", None),
        ("torch-stable-abi\N{ARABIC-INDIC DIGIT TWO}11-cpu-x86_64-linux", None),
    ],
)
def test_a_name_tells_the_backend(name, backend):
    assert backend_of(name) == backend


BROKEN = ["", "{", "[]", "{}", "null", '{"digest": []}', '{"digest": {"files": []}}', "\0", "\ud800"]


@pytest.mark.parametrize("text", BROKEN)
def test_metadata_that_cannot_be_read_is_one_line(copy, text):
    (copy / "metadata.json").write_text(text, errors="surrogatepass")
    (line,) = faults(copy, "0" * 64)
    assert line.startswith("metadata.json ")


def test_no_folder_is_one_line(tmp_path):
    (line,) = faults(tmp_path / "absent")
    assert "absent/metadata.json cannot be read" in line
