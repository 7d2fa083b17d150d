"""What tests of graphs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.graphs_of_updates import Graphs, counted_graphs


@pytest.fixture
def simulated(kernel) -> Iterator[Graphs]:
    """Graphs of updates on a device that simulates them, and counts them."""
    with counted_graphs(kernel, "cpu") as counted:
        yield counted
