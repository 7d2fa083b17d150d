"""What tests of tuning share: a clock that is a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest


class TableClock:
    """A clock on which work takes what a table says by its name; each measurement moves it on.

    The name is what `name_of` returns for the work: by default what the work itself does.
    """

    def __init__(
        self,
        table: Mapping[str, list[float] | float],
        per_burst: float = 0.0,
        name_of: Callable[[Callable[[], Any]], str] = lambda work: work(),
    ):
        self.table = {name: seconds if isinstance(seconds, list) else [seconds] for name, seconds in table.items()}
        self.per_burst, self.name_of = per_burst, name_of
        self.time = 0.0
        self.bursts: list[str] = []

    def __call__(self, device):
        return self

    def now(self) -> float:
        return self.time

    def ready(self, work):
        work()
        return work

    def seconds_of(self, work, times: int) -> float:
        name = self.name_of(work)
        self.bursts.append(name)
        turn = self.bursts.count(name) - 1
        self.time += self.per_burst
        return times * self.table[name][turn % len(self.table[name])]


@pytest.fixture
def table_clock():
    return TableClock
