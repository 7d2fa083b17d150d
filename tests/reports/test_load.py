"""Loading: the sweep runs, and the package leaves to others what it does not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import sweep_load
from tools.pages.tables import sweep_tables

# Torch searches all modules for the source of what registers an operation by `custom_op` or `register_fake`. What the
# package needs of torch is there before, as torch's own operations are searched for, too.
LOAD = """
import torch, torch.distributed.tensor, kernels
import inspect, json, sys
from pathlib import Path

searches, getframeinfo = [], inspect.getframeinfo
inspect.getframeinfo = lambda frame, *context: searches.append(frame) or getframeinfo(frame, *context)
kernels.get_local_kernel(Path(sys.argv[1]), backend=sys.argv[2])
modules, of_package = sorted(sys.modules), len(searches)
torch.library.define("seen::f", "(Tensor x) -> ()")
torch.library.register_fake("seen::f", print)
print(json.dumps([modules, of_package, len(searches)]))
"""


@pytest.fixture(scope="module")
def loaded(variant, native_backend) -> tuple[list[str], int, int]:
    """What a new process has imported when it has loaded the package, and its searches until then and with one more."""
    command = [sys.executable, "-c", LOAD, str(variant), native_backend]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", ["torch._dynamo", "torch._inductor", "matplotlib"])
def test_loading_does_not_import(loaded, module):
    """torch._dynamo alone takes longer than all the rest."""
    modules, *_ = loaded
    assert module not in modules
    assert any(name.endswith(".kernels.native") for name in modules), "the list shows what is imported"


def test_loading_searches_for_no_source(loaded):
    """A search takes milliseconds, and longer the more modules a process has."""
    _, of_package, with_one_more = loaded
    assert of_package == 0 and with_one_more == 1, "each search is seen"


def test_a_compiled_variant_leaves_out_the_portable_operations(loaded):
    names = [name.partition(".")[2] for name in loaded[0]]
    assert "kernels.native" in names and "kernels.portable.operations" not in names


def test_the_mark_of_a_constant_is_that_of_torch(kernel):
    """The decorator of torch itself would import torch._dynamo."""

    def ours():
        return "ours"

    def theirs():
        return "theirs"

    marked = kernel.kernels.tracing.constant_while_traced(ours)
    assert marked is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs)) != {}


def test_the_sweep_has_a_row_for_each_load(variant, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_load, "PRELOADED", sweep_load.TORCH_ALONE)  # torch._dynamo takes seconds
    file = tmp_path / "load.json"
    sweep_load.main(["--tiny", "--build", str(variant.parent), "--output", str(file)])
    results = json.loads(file.read_text())
    assert [row["case"] for row in results["results"]] == list(sweep_load.loads(0, "cpu"))
    assert all(0 < low <= middle <= high for low, middle, high in (row["load_seconds"] for row in results["results"]))
    (table,) = sweep_tables(results)
    assert table.title == "Time to load" and len(table.rows) == len(results["results"])
