"""The notebooks run, show what they showed when they were written, and what is committed of them is of no machine."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.hub_clients import run_tool
from tests.support.rank_pool import REPO_ID, local_kernels
from tools.hub.client_environment import client_environment
from tools.hub.server import Hub
from tools.pages.notebooks import FOLDER, MOST_BYTES, code_cells, executed, problems

NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
# Of these libraries the tests' environment has none.
OF_LIBRARIES = {"04_trainer"}
CASES = [pytest.param(name, marks=pytest.mark.integrations if name in OF_LIBRARIES else ()) for name in NAMES]
FOOTNOTE = re.compile(r"\[\d+\] ")
NUMBER = re.compile(r"\b[0-9a-f]{40}\b|\d+(?:\.\d+)?(?:e[-+]\d+)?|\bnan\b")

# What a notebook's kernel runs first beside all libraries: DeepSpeed reports itself wherever transformers finds it.
STARTUP = """\
import logging
import sys
logging.disable(logging.WARNING)
sys.path.append({repository!r})
from tests.support.torchvision_operators import declare_missing
declare_missing()
"""


@pytest.fixture(scope="module")
def user(kernel, loaded_by_default, repository, tmp_path_factory):
    """The environment of a user of a Hub that has the kernel."""
    folder = tmp_path_factory.mktemp("hub")
    build = Path(local_kernels()[REPO_ID])
    with Hub(folder / "hub") as hub:
        variables = client_environment(hub.endpoint, folder / "home")
        # The folder of integrations has an older client of the Hub, which cannot publish.
        publisher = {key: value for key, value in variables.items() if key != "PYTHONPATH"}
        done = run_tool(repository, "tools.hub.publish", "--build", build, "--allow-dirty", variables=publisher)
        assert done.returncode == 0, done.stderr
        yield variables


def outline(notebook: nbformat.NotebookNode) -> list[Any]:
    """Return of each output what is the same on every machine: printed words, and how many lines and kinds of values.

    Numbers are not: processors round differently.
    """
    return [[outline_of(output) for output in cell.outputs] for cell in code_cells(notebook)]


def outline_of(output: nbformat.NotebookNode) -> Any:
    if output.output_type == "stream":
        return output.name, [" ".join(NUMBER.sub("#", line).split()) for line in output.text.splitlines()]
    # Footnotes name the kernels of the processor, of which another one may have more or fewer.
    lines = [line for line in output.data.get("text/plain", "").splitlines() if not FOOTNOTE.match(line)]
    return sorted(output.data), len(lines)


@pytest.mark.parametrize("name", CASES)
def test_a_notebook_shows_what_it_showed(user, repository, tmp_path, name):
    """Except digits: processors round differently."""
    committed = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    startup = tmp_path / "startup.py"
    startup.write_text(STARTUP.format(repository=str(repository)) if name in OF_LIBRARIES else "")
    notebook = executed(FOLDER / f"{name}.ipynb", {**user, "PYTHONSTARTUP": str(startup)})
    assert problems(notebook) == []
    assert outline(notebook) == outline(committed)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_is_small_and_of_no_machine(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert problems(notebook) == []
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def of_output(**output) -> nbformat.NotebookNode:
    cell = nbformat.v4.new_code_cell("", outputs=[nbformat.v4.new_output(**output)])
    return nbformat.v4.new_notebook(cells=[cell])


@pytest.mark.parametrize(
    "text",
    ["/tmp/folder/file.py", "at 12:34", "UserWarning: beware", "x" * MOST_BYTES],
    ids=["path", "time", "warning", "large"],
)
def test_what_may_not_be_shown_is_found(text):
    assert problems(of_output(output_type="stream", name="stdout", text=text))
    assert not problems(of_output(output_type="stream", name="stdout", text="loss 1.5 at org/optimizer"))


def test_stderr_is_a_problem():
    assert problems(of_output(output_type="stream", name="stderr", text="beware"))


def test_outlines_differ_by_words_and_lines_and_not_by_digits():
    shown = of_output(output_type="stream", name="stdout", text="loss 1.5\nstep 3\n")
    same, other_word, more = (copy.deepcopy(shown) for _ in range(3))
    same.cells[0].outputs[0].text = "loss 2.25e-3\nstep 40\n"
    other_word.cells[0].outputs[0].text = "loss 1.5\nsteps 3\n"
    more.cells[0].outputs[0].text += "end\n"
    assert outline(same) == outline(shown)
    assert outline(other_word) != outline(shown) != outline(more)


def test_outlines_of_tables_differ_by_rows_and_not_by_footnotes():
    """Footnotes name the kernels of a processor, and another one may have more of them."""
    tables = ("name\nup [1]\n[1] gemm_", "name\nup [1]\n[1] torch\n[2] gemm_", "name\nup [1]\ndown [1]\n[1] gemm_")
    shown, other_kernels, more = (of_output(output_type="display_data", data={"text/plain": text}) for text in tables)
    assert outline(shown) == outline(other_kernels) != outline(more)
