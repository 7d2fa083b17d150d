"""The notebooks of examples/notebooks: run against a Hub on this machine, and written back with what they showed.

    python -m tools.pages.notebooks [NAME ...]

Builds the working tree's kernel, publishes it to a Hub on 127.0.0.1, and runs each notebook from top to bottom as a
user of that Hub. What a notebook shows may not depend on the machine: no path, no time of day, no warning.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from rich.console import Console

from examples.character_model.delivery import CommandError, published_kernel

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
VERIFY = ROOT / "tools" / "pins" / "verify.py"
MOST_BYTES = 100_000
# A kernel of work in progress says so wherever it is loaded, which is no matter of the notebook.
_DIRTY = re.compile(r".*was built from a dirty git tree.*\n?")
_FOREIGN = re.compile(r"(?<![\w/])/(?:tmp|home|root|work|Users|var|opt|usr)/|\b\d{1,2}:\d{2}\b|[Ww]arning")


def executed(path: Path, environment: Mapping[str, str]) -> NotebookNode:
    """Return the notebook with the outputs of a run with these variables; `CellExecutionError` where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(VERIFY, folder)  # as users keep it beside their code
        # One thread, as a notebook's small products would only wait for others; no bars, which are drawn by time, nor
        # the word that they would be prettier with another package.
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
        quiet["PYTHONWARNINGS"] = "ignore:IProgress not found"
        quiet |= {**dict.fromkeys(("IPYTHONDIR", "XDG_CACHE_HOME"), folder), "MPLCONFIGDIR": _fonts().name}
        resources = {"metadata": {"path": folder}}
        options = {
            "timeout": 300,
            "startup_timeout": 300,
            "kernel_name": "python3",
            "record_timing": False,
            "coalesce_streams": True,
        }
        client = NotebookClient(notebook, resources=resources, **options)
        client.execute(env={**environment, **quiet})
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for cell in code_cells(notebook):
        cell.outputs = [output for output in map(_plain, cell.outputs) if output.get("text") != ""]
    return notebook


@functools.cache
def _fonts() -> tempfile.TemporaryDirectory:
    """A folder with Matplotlib's list of fonts: where making it takes long, a notebook would say so."""
    folder = tempfile.TemporaryDirectory()
    command = [sys.executable, "-c", "import matplotlib.font_manager"]
    subprocess.run(command, env={**os.environ, "MPLCONFIGDIR": folder.name}, capture_output=True, check=True)
    return folder


def _plain(output: NotebookNode) -> NotebookNode:
    if output.output_type == "stream":
        output.text = _DIRTY.sub("", output.text)
    return output


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the cells that are code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def problems(notebook: NotebookNode) -> list[str]:
    """Return what may not be in a notebook's outputs: errors, warnings, paths and times of a machine, or too much."""
    faults = []
    for output in (output for cell in code_cells(notebook) for output in cell.outputs):
        data = output.get("data", {})
        text = output.get("text", "") + data.get("text/plain", "") + data.get("text/html", "")
        faults += [f"writes to stderr: {text}"] if output.get("name") == "stderr" else []
        faults += [f"is of one machine: {match[0]}" for match in _FOREIGN.finditer(text)]
    size = len(nbformat.writes(notebook).encode())
    return faults + ([f"has {size} bytes, more than {MOST_BYTES}"] if size > MOST_BYTES else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="such as 01_first_contact; by default all of them")
    names, console, failed = parser.parse_args().names, Console(), False
    paths = [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb"))
    try:
        with tempfile.TemporaryDirectory() as folder, published_kernel(console, Path(folder)) as environment:
            for path in paths:
                notebook = executed(path, environment)
                nbformat.write(notebook, path)
                faults = problems(notebook)
                failed = failed or bool(faults)
                console.print(path.stem, *faults, sep="\n  ", markup=False, highlight=False, soft_wrap=True)
    except CommandError as failure:
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        return 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
