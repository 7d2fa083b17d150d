"""The order in which chunks of an exchange, work on them, and work of this process alone take turns."""

from __future__ import annotations

import pytest


def order(kernel, chunks: int, in_flight: int) -> list[str]:
    """Return what is begun, in its order: gathers g, work w, and descents d of each chunk, and local work.

    After the chunks come those of another exchange, numbered from 100.
    """
    found: list[str] = []

    def chunk(number: int):
        found.append(f"g{number}")
        yield
        found.append(f"w{number}")
        yield
        found.append(f"d{number}")

    exchanges = [map(chunk, range(chunks)), map(chunk, range(100, 100 + chunks))]
    rounds = kernel.step.pipeline.advanced(exchanges, in_flight)
    next(rounds, None)
    found.append("local")
    for _ in rounds:
        pass
    return found


@pytest.mark.parametrize("chunks", [0, 1, 2, 7])
@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_local_work_hides_the_first_gather(kernel, chunks, in_flight):
    found = order(kernel, chunks, in_flight)
    assert found.index("local") == min(chunks, 1)
    every = [*range(chunks), *range(100, 100 + chunks)]
    assert sorted(found) == sorted(["local", *(f"{stage}{k}" for k in every for stage in "gwd")])


def test_an_exchange_begins_when_the_one_before_has_ended(kernel):
    found = order(kernel, 3, 5)
    assert found.index("d2") < found.index("g100")


@pytest.mark.parametrize("in_flight", [2, 3, 9])
def test_behind_work_on_a_chunk_fly_the_gather_of_the_next_and_the_results_of_the_last(kernel, in_flight):
    found = order(kernel, 6, in_flight)
    for k in range(5):
        assert found.index(f"g{k + 1}") < found.index(f"w{k}")
        assert found.index(f"w{k + 1}") < found.index(f"d{k}")


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_besides_the_one_that_is_worked_on_no_more_chunks_are_under_way_than_asked_for(kernel, in_flight):
    under_way = 0
    for event in order(kernel, 12, in_flight):
        under_way += {"g": 1, "d": -1}.get(event[0], 0)
        assert under_way <= in_flight + 1
