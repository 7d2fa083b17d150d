"""`--help` of a tool tells what it does, and does nothing."""

import ast
import json
import subprocess
import sys

import pytest

# Those that take few arguments or none, and begin long work.
TOOLS = {
    "examples.learning_rates": "examples/learning_rates/__main__.py",
    "examples.recipes": "examples/recipes/__main__.py",
    "tools.emulation.debian": "tools/emulation/debian.py",
    "tools.emulation.fingerprint": "tools/emulation/fingerprint.py",
    "tools.feigned_gpu": "tools/feigned_gpu/__main__.py",
    "tools.pages.learning_rates": "tools/pages/learning_rates.py",
    "tools.pages.recipes": "tools/pages/recipes.py",
    "tools.release.tag": "tools/release/tag.py",
}

# One process runs all of them as `python -m` does: most import torch, which takes seconds.
RUN = """
import contextlib, io, json, runpy, sys

def helped(module):
    sys.argv[1:] = ["--help"]
    status, out, errors = None, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), errors.getvalue()

print(json.dumps({module: helped(module) for module in sys.argv[1:]}))
"""


def seen(repository):
    """Return when each figure was written, and what is in the folder for results."""
    figures = {path.name: path.stat().st_mtime_ns for path in (repository / "docs/figures").iterdir()}
    return figures, sorted(path.name for path in (repository / "out").glob("*"))


@pytest.fixture(scope="module")
def asked(repository):
    """What each tool returned and printed, and what was seen before and after."""
    before, command = seen(repository), [sys.executable, "-c", RUN, *TOOLS]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout), before, seen(repository)


@pytest.mark.parametrize("module", TOOLS)
def test_help_is_the_docstring(repository, asked, module):
    docstring = ast.get_docstring(ast.parse((repository / TOOLS[module]).read_text()))
    status, printed, errors = asked[0][module]
    assert status == 0 and not errors
    assert " ".join(docstring.split()) in " ".join(printed.split())


def test_help_writes_neither_figures_nor_results(asked):
    _, before, after = asked
    assert after == before
