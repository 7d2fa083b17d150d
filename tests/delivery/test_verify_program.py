"""tools/pins/verify.py as a program, and as a file on its own."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compiled_variants import NAME
from tests.support.hub_clients import digest_again, write_variant
from tools.pins import verify as module
from tools.pins.verify import pin_of


def run(*arguments: object, program: Path = Path(module.__file__)) -> tuple[int, list[str]]:
    command = [sys.executable, "-I", str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_the_program_tells_of_every_variant_in_a_folder(copy, pin, tmp_path):
    other = write_variant(copy.parent / "torch-cpu", "0000002", 2)
    (other / "__init__.py").unlink()
    (copy.parent / "CARD.md").touch()
    pins = tmp_path / "optimizer.pins.json"
    pins.write_text(json.dumps({"variants": {NAME: pin, "torch-cpu": pin_of(other)}}))
    told = ["torch-cpu: refused", "  __init__.py is missing", f"{NAME}: intact, pin {pin}"]
    assert sorted(told) == sorted(run(copy.parent)[1])
    assert run(copy.parent)[0] == 1
    assert run(copy, "--pins", pins) == (0, [f"{NAME}: intact, pin {pin}"])
    digest_again(other)
    assert run(other, "--pins", pins)[0] == 1


@pytest.mark.parametrize("name", ["", "absent"])
def test_a_folder_without_a_variant_fails(tmp_path, name):
    status, lines = run(tmp_path / name)
    assert status == 1 and lines[0].endswith(": refused") and "cannot be read" in lines[1]


@pytest.mark.parametrize("text", [None, "{", "{}", "[]", '{"variants": null}'])
def test_what_is_no_file_of_pins_is_one_line(copy, tmp_path, text):
    pins = tmp_path / "optimizer.pins.json"
    if text is not None:
        pins.write_text(text)
    status, lines = run(copy, "--pins", pins)
    assert status == 2 and "is no file of pins" in lines[-1]


def test_the_file_needs_the_standard_library_alone_and_works_where_it_is_copied(copy, pin, tmp_path):
    tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 9))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names
    elsewhere = shutil.copy(module.__file__, tmp_path / "verify_kernels.py")
    assert run(copy, program=elsewhere) == (0, [f"{NAME}: intact, pin {pin}"])


@pytest.mark.skipif(os.name != "posix", reason="limits of memory")
def test_large_files_are_not_read_into_memory(copy):
    """A process with little memory gives the answer of one with much."""
    with (copy / "scaling.py").open("wb") as large:
        large.truncate(2**29)
    program = ["sh", "-c", 'ulimit -v 262144; exec "$0" "$@"', sys.executable, "-I", module.__file__, copy]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        f"{NAME}: refused",
        "  scaling.py is not what the digest says: its sha256 differs",
    ]


def test_what_cannot_be_read_is_told_in_lines(copy, tmp_path):
    status, told = run(tmp_path / ("a" * 300))
    assert status == 1 and "cannot be read: File name too long" in told[1]
    nested = tmp_path / "nested.json"
    nested.write_text("[" * 100_000)
    status, told = run(copy, "--pins", nested)
    assert status == 2 and "is no file of pins: RecursionError" in told[-1]
