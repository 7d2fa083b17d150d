"""`--help` of a tool tells what it does, and does nothing."""

import ast
import subprocess
import sys

import pytest

# Those that take few arguments or none, and begin long work.
TOOLS = {
    "tools.emulation.debian": "tools/emulation/debian.py",
    "tools.emulation.fingerprint": "tools/emulation/fingerprint.py",
    "tools.feigned_gpu": "tools/feigned_gpu/__main__.py",
    "tools.pages.learning_rates": "tools/pages/learning_rates.py",
    "tools.pages.recipes": "tools/pages/recipes.py",
    "tools.release.tag": "tools/release/tag.py",
}


def seen(repository):
    """Return when each figure was written, and what is in the folder for results."""
    figures = {path.name: path.stat().st_mtime_ns for path in (repository / "docs/figures").iterdir()}
    return figures, sorted(path.name for path in (repository / "out").glob("*"))


@pytest.mark.parametrize("module", TOOLS)
def test_help_is_the_docstring(repository, module):
    docstring = ast.get_docstring(ast.parse((repository / TOOLS[module]).read_text()))
    before = seen(repository)
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr
    assert " ".join(docstring.split()) in " ".join(done.stdout.split())
    assert seen(repository) == before
