"""Installed, verified and loaded under hard conditions, a kernel is what was published."""

from __future__ import annotations

import pytest

from tests.support.attacks.hard_conditions import CONDITIONS, loads_under
from tests.support.attacks.lie_trials import stage


@pytest.fixture(scope="module")
def theatre(tmp_path_factory):
    with stage(tmp_path_factory.mktemp("conditions")) as opened:
        yield opened


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_load_is_the_honest_one(theatre, name):
    loads = loads_under(theatre, name)
    assert loads and all(load.end == "honest" and not load.ran for load in loads), loads
