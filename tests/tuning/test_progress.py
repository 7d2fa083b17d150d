"""The line that says how far a call has come, on whatever stands in for the output."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_is_drawn_in_place_on_terminals_alone(kernel, capsys, monkeypatch, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "30")
    line = kernel.tuning.progress.Line("warm-up")
    line(1, 2, "a long text that no line of thirty holds")
    line(2, 2, "end")
    printed = capsys.readouterr().out
    if terminal:
        first, second = printed.lstrip("\r").split("\r")
        assert (
            len(first) == 29 and second.rstrip("\n").ljust(29) == "warm-up 2/2: end".ljust(29) and second.endswith("\n")
        )
    else:
        assert printed == "warm-up 1/2: a long text that no line of thirty holds\nwarm-up 2/2: end\n"


def test_progress_is_drawn_in_place_in_a_notebook(kernel, monkeypatch):
    """Its stream is no terminal, and takes carriage returns all the same."""
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr("sys.stdout", stream)
    line = kernel.tuning.progress.Line("warm-up")
    line(1, 2, "a longer stage")
    line(2, 2, "end")
    line(1, 2, "on")  # after the end nothing has to be drawn over
    assert stream.getvalue() == "\rwarm-up 1/2: a longer stage\rwarm-up 2/2: end           \n\rwarm-up 1/2: on"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_seen_as_soon_as_it_is_made(kernel, monkeypatch, terminal):
    """A file or a pipe would keep it back for long."""
    done = []
    stream = {"write": lambda text: done.append("written"), "flush": lambda: done.append("seen")}
    monkeypatch.setattr("sys.stdout", SimpleNamespace(**stream, isatty=lambda: terminal))
    kernel.tuning.progress.Line("tune")(1, 2, "a stage")
    assert "written" in done and done[-1] == "seen"


@pytest.mark.parametrize("stream", [io.StringIO(), SimpleNamespace(write=lambda text: None, flush=lambda: None), None])
def test_progress_needs_no_terminal_and_no_output(kernel, monkeypatch, stream):
    """Loggers that stand in for the output may have `write` and `flush` alone, and a service may have no output."""
    monkeypatch.setattr("sys.stdout", stream)
    kernel.tuning.progress.Line("tune")(1, 1, "done")


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_progress_goes_on_when_its_reader_is_gone(kernel, monkeypatch, error):
    def write(text):
        raise error

    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=write, flush=lambda: None))
    kernel.tuning.progress.Line("tune")(1, 1, "done")


def test_a_warm_up_counts_the_stages_of_later_phases_as_they_look_then(kernel):
    """What is compiled depends on what was measured: here each stage of the first phase adds one to the second."""
    added, seen = [], []
    phases = (
        lambda: [lambda: added.append("more") or "first"] * 2,
        lambda: [lambda: "second"] * (1 + len(added)),
        lambda: [lambda: "third"],
    )
    kernel.step.warmup.warm_up(phases, lambda done, total, what: seen.append((done, total, what)))
    assert [what for *_, what in seen] == ["first"] * 2 + ["second"] * 3 + ["third"]
    assert [done for done, *_ in seen] == [1, 2, 3, 4, 5, 6]
    assert {total for _, total, what in seen if what != "first"} == {6} and seen[0][1] == 2 + 1 + 1
