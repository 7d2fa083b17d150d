"""A way to take a step that loses the GPU costs the lab one run; the next one measures the other ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.result_file import LOST
from benchmarks.step_rivals import OURS
from tools.lab import measure, step_ways
from tools.lab.records import FILE, Record, append
from tools.lab.worker import attempt

ERROR = "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def run(lab, monkeypatch):
    """A function that runs the item once, with a way that loses the GPU at one of its calls.

    It returns the record, whether the GPU was lost, and how often that way was taken.
    """
    item = measure.ways_of(lab, "gpt2-124m")

    def run_once(loser: str, last: int) -> tuple[Record, bool, int]:
        calls = []

        def lose() -> None:
            calls.append(1)
            if len(calls) == last:
                raise RuntimeError(ERROR)

        names = OURS, step_ways.CAPTURED, step_ways.TORCH_MUON
        made: dict[str, Callable] = {name: lambda: lambda: None for name in names} | {loser: lambda: lose}
        monkeypatch.setattr(step_ways, "ways", lambda *_: made)
        record, lost = attempt(item, Record("measure", item.key, "failed", 0.0))
        append(lab.out / FILE, record)
        return record, lost, len(calls)

    return run_once


@pytest.mark.parametrize("last", [1, 2, 3], ids=["at its first step", "in a warm-up", "in a round"])
@pytest.mark.parametrize("loser, status", [(step_ways.TORCH_MUON, "ok"), (step_ways.CAPTURED, "failed")])
def test_a_way_that_loses_the_gpu_is_not_taken_again(run, loser, status, last):
    """The item of a way of ours has failed in every run, but the other ways have their rows."""
    first, lost, calls = run(loser, last)
    assert first.status == "failed" and lost and calls == last
    assert first.problem == f"{loser}: RuntimeError: {ERROR}"
    for _ in range(2):
        record, lost, calls = run(loser, last)
        assert record.status == status and not lost and not calls
        times = {row["step of"]: row["milliseconds"] for row in record.value["results"]}
        assert times.pop(loser) == record.value[LOST][loser] == f"lost the GPU: RuntimeError: {ERROR}"
        assert len(times) == 2 and all(isinstance(time, float) for time in times.values())
