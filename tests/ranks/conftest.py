"""What several files of tests over ranks begin with."""

from __future__ import annotations

import pytest


@pytest.fixture
def fresh_pool(pools, request):
    """Four ranks whose processes, and what these know of each other, do not outlive the test.

    A collective waits as long as `SECONDS` of the test's file says.
    """
    pool = pools(4, getattr(request.module, "SECONDS", 20.0))
    yield pool
    pool.close()
