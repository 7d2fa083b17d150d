"""The trace of a step counts what its definition says, and is the same at every run."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from benchmarks.variants import chosen_variants, commit_of
from tools.trace import step
from tools.trace.traced_step import trace_step
from tools.trace.tracer import trace

FIRST = """
from .second import double, numbers

def total(apply):
    amount = 0
    for number in numbers(2):
        amount += apply(double, number)
    return amount
"""
SECOND = """
def double(x):
    return helper(x)

def helper(x):
    return 2 * x

def numbers(count):
    yield from range(count)
"""


@pytest.fixture
def toy_package(tmp_path):
    """A package of two files, imported."""
    folder = tmp_path / "toy_package"
    folder.mkdir()
    for name, text in {"__init__": "from .first import total", "first": FIRST, "second": SECOND}.items():
        (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location("toy_package", folder / "__init__.py")
    sys.modules["toy_package"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module, folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_package"]:
        del sys.modules[name]


@pytest.fixture
def toy_trace(toy_package):
    module, folder = toy_package
    return trace(lambda: module.total(lambda function, x: function(x)), folder)


def test_the_trace_of_a_toy_is_what_one_counts_by_hand(toy_trace):
    """Its generator is entered three times, with 0, with 1 and to end; the caller's lambda is not the package's."""
    entered = ["numbers", "double", "helper", "numbers", "double", "helper", "numbers"]
    assert [(stay.file, stay.depth, stay.functions) for stay in toy_trace.stays] == [
        ("first.py", 0, ["total"]),
        ("second.py", 1, entered),
    ]
    assert (toy_trace.calls, len(toy_trace.functions), toy_trace.files) == (8, 4, 2)
    assert toy_trace.nesting == 3
    # One entry is of another file than the one before; `total` goes on five times and is left as often.
    assert (toy_trace.changes, toy_trace.switches) == (1, 10)


def test_what_raises_ends_the_trace(toy_package):
    module, folder = toy_package

    def fail(*_):
        raise KeyError

    with pytest.raises(KeyError):
        trace(lambda: module.total(fail), folder)
    assert sys.getprofile() is None
    assert trace(lambda: None, folder).calls == 0


def test_a_walk_names_each_function_of_a_stay_once(toy_trace):
    assert list(step.walk(toy_trace)) == [
        "   1 first.py: total",
        "   2   second.py: numbers x3, double x2, helper x2",
    ]


def test_a_step_is_traced_alike_every_time(kernel, one_thread):
    tracing = trace_step(kernel)
    assert tracing == trace_step(kernel)
    assert tracing.files > 1 and tracing.calls >= len(tracing.functions) and tracing.switches >= tracing.changes


def test_every_rank_is_traced_by_itself(kernel, pools):
    for rank_trace in pools(4).run(trace_step):
        assert rank_trace.files > 1 and rank_trace.nesting > 1


def test_the_tool_writes_results_and_table(variant, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- trace -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(step, "PAGE", page)
    monkeypatch.setattr(step, "RESULTS", tmp_path / "trace.json")
    step.main(["--variant", str(variant.parent), "--ranks", "1", "--write"])
    results = json.loads((tmp_path / "trace.json").read_text())
    (row,) = results["rows"]
    assert row[:2] == [commit_of(variant), "1"] and len(row) == len(step.HEADINGS)
    assert all(int(count) > 0 for count in row[1:])
    assert " | ".join(row) in page.read_text() and "old" not in page.read_text()
    assert row[2] in capsys.readouterr().out


def test_architecture_has_the_table_of_the_results_file(repository):
    results = json.loads((repository / "benchmarks/results/step-trace.json").read_text())
    page = (repository / "docs/architecture.md").read_text()
    assert step.filled(page, results) == page


def test_builds_are_called_by_their_commits(variant):
    commit = commit_of(variant)
    assert chosen_variants([variant, variant.parent, variant]) == {
        commit: variant.resolve(),
        f"{commit} (2)": variant.resolve(),
        f"{commit} (3)": variant.resolve(),
    }


def test_a_folder_without_a_build_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        step.main(["--variant", str(tmp_path)])
    assert f"in {tmp_path}, which has no variant" in capsys.readouterr().err
