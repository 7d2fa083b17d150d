"""docs/attacks.md is what the tool makes of its results, and an attack that is not survived cannot be overlooked."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("rich")

from tests.support.attacks.hub_faults import faults
from tools.attacks import __main__ as program
from tools.attacks import page
from tools.attacks.groups import Attack

SURVIVED = Attack("group", "one", True, False, "refused")
MISSED = Attack("group", "two", False, None, "loaded [it]")


def test_the_page_is_made_of_the_results():
    assert page.PAGE.read_text() == page.page(json.loads(page.RESULTS.read_text()))


def test_the_results_are_of_all_groups_and_no_attack_was_missed():
    groups = json.loads(page.RESULTS.read_text())["groups"]
    assert {*groups} == {*page.ABOUT, "all"}
    assert all(counted["survived"] == counted["tried"] for counted in groups.values())
    assert groups["faults of the Hub"]["tried"] == len(faults())


@pytest.fixture
def attacked(monkeypatch, tmp_path, capsys):
    """Run the program on these attacks; return its status, what it printed and whether it wrote a page."""
    monkeypatch.setattr(page, "PAGE", tmp_path / "attacks.md")
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr("sys.argv", ["attacks"])

    def run(*attacks: Attack) -> tuple[int, str, bool]:
        def group(folder):
            """What is tried."""
            yield from attacks

        monkeypatch.setattr(program, "GROUPS", (group,))
        return program.main(), capsys.readouterr().out, page.PAGE.exists()

    return run


def test_a_miss_is_named_and_fails_and_no_page_is_written(attacked):
    status, printed, written = attacked(SURVIVED, MISSED)
    assert (status, written) == (1, False)
    assert "not survived: group: two: loaded [it]" in printed


def test_without_a_miss_the_page_is_written(attacked):
    status, printed, written = attacked(SURVIVED)
    assert (status, written) == (0, True)
    assert "not survived" not in printed
