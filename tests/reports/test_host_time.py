"""The sweep of the host's time has its columns, and times what it says: no compiled work, and nobody's messages."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.library import Library

from benchmarks import sweep_host_time
from benchmarks.host_cases import Case, build_optimizer, imagined_ranks
from benchmarks.host_worker import Worker, empty_ops
from tools.pages.tables import sweep_tables


@pytest.fixture(scope="module")
def results(variant, tmp_path_factory):
    """The results of the tiny sweep over one build, given twice, of the case of several ranks."""
    file = tmp_path_factory.mktemp("results") / "host-time.json"
    twice = ["--variant", str(variant), "--variant", str(variant.parent)]
    sweep_host_time.main(["--tiny", "--cases", "ranks", *twice, "--output", str(file)])
    return json.loads(file.read_text())


def test_every_case_has_a_row_for_each_build(results):
    first, second = results["builds"]
    assert second == f"{first} (2)" and first.startswith(results["commit"][:12])
    case = sweep_host_time.TINY_CASES[1]
    assert [row["case"] for row in results["results"]] == [f"{case}, {first}", f"{case}, {second}"]
    for row in results["results"]:
        low, middle, high = row["host_milliseconds"]
        assert 0 < low <= middle <= high and row["rounds"] == results["rounds"]
        assert row["host_milliseconds_per_100_matrices"] == pytest.approx(100 * middle / row["matrices"])
        assert row["over_first"] == sorted(row["over_first"]) and 0 < row["over_first"][0]
    assert results["results"][0]["over_first"] == [1, 1, 1]


def test_the_page_of_results_shows_the_host_time(results):
    measured = results["results"][0]
    (table,) = sweep_tables({"results": [measured, {"case": "another", "status": "unmeasured"}]})
    per_100 = f"{measured['host_milliseconds_per_100_matrices']:.4g}"
    assert table.rows[0][2:] == (per_100, "1", "1.00 (1.00-1.00)")
    assert len(table.rows) == 1 and table.title.endswith("1 of 2 unmeasured")


def test_a_step_in_one_process_takes_time(variant):
    with Worker(variant, sweep_host_time.TINY_CASES[0]) as worker:
        assert 0 < worker.steps(2) < 1


def test_workers_take_turns_and_another_one_begins_every_round():
    asked = []

    class Told:
        def __init__(self, name):
            self.name = name

        def steps(self, count):
            asked.append((self.name, count))
            return 1.0

    seconds = sweep_host_time.take_turns({"a": Told("a"), "b": Told("b")}, 5, 2, sweep_host_time.Deadline())
    warm_up = sweep_host_time.WARM_UP
    assert asked == [("a", warm_up), ("b", warm_up), ("a", 5), ("b", 5), ("b", 5), ("a", 5)]
    assert seconds == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_a_case_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="7 ranks"):
        sweep_host_time.chosen_cases("7 ranks", sweep_host_time.CASES)


def test_what_a_worker_raises_is_raised_here(tmp_path):
    with Worker(tmp_path, Case(4)) as worker, pytest.raises(RuntimeError, match="FileNotFoundError"):
        worker.steps(1)


def test_emptied_ops_do_nothing_but_those_that_return_something():
    library = Library("toy_of_host_time", "DEF")
    library.define("double_(Tensor(a!) x) -> ()")
    library.define("answer() -> int")
    library.impl("double_", lambda x: x.mul_(2) and None, "CPU")
    library.impl("answer", lambda: 42, "CompositeExplicitAutograd")
    x, ops = torch.ones(1), torch.ops.toy_of_host_time
    emptied = empty_ops("toy_of_host_time")
    ops.double_(x)
    assert x.item() == 1 and ops.answer() == 42
    emptied._destroy()
    ops.double_(x)
    assert x.item() == 2


def test_one_of_many_ranks_steps_again_and_again(kernel):
    """What others would have sent is there, so that the second step does not say that ranks were at odds."""
    with imagined_ranks(8):
        optimizer = build_optimizer(kernel, Case(24, ((1, 8), (2, 8)), 8))
        before = [p.to_local().clone() for group in optimizer.param_groups for p in group["params"]]
        for _ in range(3):
            optimizer.step()
        after = [p.to_local() for group in optimizer.param_groups for p in group["params"]]
        assert not any(map(torch.equal, before, after))
    assert not dist.is_initialized()
