"""Bytecode beside a pinned variant or elsewhere: what Python may have written goes, and what cannot go is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.pins import verify as module
from tools.pins.verify import VerificationError, faults, verify


def test_bytecode_goes_when_all_else_is_right_and_only_then(copy, pin):
    cache = copy / "shapes/__pycache__"
    cache.mkdir()
    (cache / "square.cpython-311.pyc").touch()
    (line,) = faults(copy, pin)
    assert line.startswith("shapes/__pycache__/square.cpython-311.pyc is bytecode")
    with pytest.raises(VerificationError):
        verify(copy, "0" * 64)
    assert list(cache.iterdir())
    assert verify(copy, pin) == copy
    assert not list(cache.iterdir()) and faults(copy, pin) == []


def test_no_other_folder_is_emptied_that_takes_the_place_of_a_cache(copy, pin, tmp_path, monkeypatch):
    """Who verifies may have more rights than who can write here, and that one may be fast."""
    cache, other = copy / "__pycache__", tmp_path / "other"
    for folder in (cache, other):
        folder.mkdir()
        (folder / "scaling.cpython-311.pyc").touch()
    examined = module._examined

    def examined_and_exchanged(*arguments):
        seen = examined(*arguments)
        cache.rename(tmp_path / "gone")
        cache.symlink_to(other)
        return seen

    monkeypatch.setattr(module, "_examined", examined_and_exchanged)
    with pytest.raises(VerificationError, match=r"scaling.cpython-311\.pyc is bytecode that cannot be deleted"):
        verify(copy, pin)
    assert list(other.iterdir())


def test_bytecode_that_another_process_deletes_first_is_gone(copy, pin, monkeypatch):
    cache, examined = copy / "__pycache__", module._examined
    for remove in (lambda: [file.unlink() for file in cache.iterdir()], lambda: shutil.rmtree(cache)):
        cache.mkdir(exist_ok=True)
        (cache / "scaling.cpython-311.pyc").touch()
        monkeypatch.setattr(module, "_examined", lambda *of, remove=remove: (examined(*of), remove())[0])
        assert verify(copy, pin) == copy


@pytest.mark.parametrize("optimized", ["", "1", "2"])
def test_bytecode_that_python_keeps_elsewhere_goes_too(copy, pin, tmp_path, optimized):
    """With PYTHONPYCACHEPREFIX Python looks for bytecode in no folder of the variant."""
    mark, program = tmp_path / "mark", tmp_path / "program.py"
    program.write_text(LOAD_WITH_FOREIGN_BYTECODE.format(copy=str(copy), mark=str(mark)))
    elsewhere = {"PYTHONPYCACHEPREFIX": str(tmp_path / "elsewhere"), "PYTHONOPTIMIZE": optimized}
    for check, foreign in ((None, True), (pin, False)):
        mark.unlink(missing_ok=True)
        command = [sys.executable, str(program), *filter(None, [check])]
        environment = {**os.environ, **elsewhere, "PYTHONPATH": str(Path(module.__file__).parent)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert mark.exists() is foreign


LOAD_WITH_FOREIGN_BYTECODE = """
import importlib.util, py_compile, sys
from pathlib import Path
from verify import faults, verify
source, foreign = Path({copy!r}, "shapes/__init__.py"), Path("{mark}.py")
foreign.write_text("open({mark!r}, 'w')")
file = importlib.util.cache_from_source(str(source))
py_compile.compile(str(foreign), file, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
for pin in sys.argv[1:]:
    (line,) = faults(source.parents[1], pin)
    assert line.startswith(file + " is bytecode"), line
    verify(source.parents[1], pin)
sys.path.insert(0, str(source.parents[1]))
import shapes
"""


def test_bytecode_that_cannot_go_is_refused(copy, pin):
    (copy / "__pycache__/inside").mkdir(parents=True)
    with pytest.raises(VerificationError, match="inside is bytecode that cannot be deleted"):
        verify(copy, pin)
