"""What several files of tests over ranks begin with."""

from __future__ import annotations

import pytest


@pytest.fixture
def fresh_pool(pools):
    """Four ranks whose processes, which have agreed on something, do not outlive the test."""
    pool = pools(4, 20.0)
    yield pool
    pool.close()
