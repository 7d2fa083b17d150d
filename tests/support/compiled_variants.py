"""A small variant with a library, a package and data inside, and foreign code that leaves a mark when it runs."""

from __future__ import annotations

import functools
import platform
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from tests.support.hub_clients import digest_again, write_variant

NAME = f"torch-stable-abi211-cpu-{platform.machine()}-linux"
OPS = "_tiny_cpu_0000002"
# The environment variable with the path of the file that foreign code writes.
MARK = "MARK_OF_FOREIGN_CODE"
FOREIGN = f"import os, pathlib\npathlib.Path(os.environ['{MARK}']).touch()\n"

MODULES = {
    "__init__.py": 'from . import _ops, shapes\nfrom .scaling import scale\n\n__all__ = ["scale"]\n',
    "_ops.py": f"from . import {OPS}\n\nops = {OPS}\n",
    "scaling.py": "def scale(x):\n    return 2 * x\n",
    "shapes/__init__.py": "from . import square\n",
    "shapes/square.py": "SIDES = 4\n",
    "data.json": "{}\n",
}
# The array makes the file long, so that one cut short still begins well.
LIBRARY = """
#include <Python.h>
#include <stdio.h>
#include <stdlib.h>

const char padding[1 << 16] = {1};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "library", padding, 0, NULL};
PyMODINIT_FUNC PyInit_%(ops)s(void) { return PyModule_Create(&definition); }
"""
# As a library of the variant, and as a module that hides scaling.py.
FOREIGN_LIBRARY = (
    LIBRARY
    + """
PyMODINIT_FUNC PyInit_scaling(void) { return PyModule_Create(&definition); }

__attribute__((constructor)) static void run(void) {
  FILE* mark = fopen(getenv("%(mark)s"), "w");
  if (mark) fclose(mark);
}
"""
)


@functools.cache
def compiled(source: str) -> bytes:
    """Return the library that one of the sources above gives."""
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "library.c"), Path(folder, "library.so")
        code.write_text(source % {"ops": OPS, "mark": MARK})
        headers = f"-I{sysconfig.get_path('include')}"
        subprocess.run(["gcc", "-shared", "-fPIC", headers, str(code), "-o", str(library)], check=True)
        return library.read_bytes()


def write_compiled_variant(build: Path) -> Path:
    """Write the variant into the folder `build` and return it."""
    variant = write_variant(build / NAME, OPS.rpartition("_")[2], 2)
    (variant / "shapes").mkdir()
    for name, text in MODULES.items():
        (variant / name).write_text(text)
    (variant / f"{OPS}.abi3.so").write_bytes(compiled(LIBRARY))
    digest_again(variant)
    return variant
