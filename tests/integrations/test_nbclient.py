"""Jupyter, by nbclient

The last line of a cell shows what goes where.
"""

import inspect

import nbclient
import nbformat
import pytest

from tests.support.rank_pool import REPO_ID

pytestmark = pytest.mark.integrations


def cell(optimizer, model):
    # <use>
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    opt.explain()
    # </use>


def used():
    """The lines between the markers of `cell`, which a notebook runs at its top."""
    lines = inspect.cleandoc("\n" + inspect.getsource(cell).split("# <use>\n")[1].split("# </use>")[0])
    return lines


def test_a_cell_shows_what_goes_where(repository):
    """The last line of a cell shows the table of `explain()`.

    In a kernel of its own, which gets the package as notebooks do.
    """
    start = f"""
import sys
sys.path.insert(0, {str(repository)!r})
from kernels import get_kernel
from tests.integrations.training import LanguageModel
optimizer = get_kernel({REPO_ID!r}, version=0, trust_remote_code=True)
model = LanguageModel()
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in (start, used())])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    (shown,) = [output.data for output in notebook.cells[1].outputs if output.output_type == "execute_result"]
    assert "embed_tokens.weight" in shown["text/plain"] and "muon" in shown["text/plain"]
