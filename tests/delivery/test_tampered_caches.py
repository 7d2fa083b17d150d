"""Of the caches that somebody has tampered with none is loaded by who verifies with a pin; many are by who does not."""

from __future__ import annotations

import pytest

from tests.support.attacks.tampered_caches import CACHES, DELETED, TODAY
from tests.support.attacks.tampered_trials import tampered_caches


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What became of every cache, by its name."""
    return tampered_caches(tmp_path_factory.mktemp("tampered"))


def test_an_untouched_cache_loads_and_does_so_again(seen):
    honest = {"end": "loads", "result": 2.0, "foreign": False}
    assert [seen[name]["with pin"] for name in ("untouched", "started again")] == [honest, honest]
    assert seen["untouched"]["bytecode before"] == 0 < seen["started again"]["bytecode before"]


@pytest.mark.parametrize("name", [name for name, tamper in CACHES])
def test_with_a_pin_no_tampered_cache_is_loaded(seen, name):
    done = seen[name]["with pin"]
    assert not done["foreign"]
    if name in [name for name, today, tamper in DELETED]:
        assert (done["end"], done["result"]) == ("loads", 2.0)
    else:
        assert done["end"] == "refused", done


@pytest.mark.parametrize("name", [name for name, tamper in CACHES])
def test_the_table_says_what_happens_without_one(seen, name):
    done = seen[name]["today"]
    assert ("foreign" if done["foreign"] else done["end"]) == TODAY[name], done
