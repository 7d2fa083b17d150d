"""docs/attacks.md is what the tool makes of its results, and an attack that is not survived cannot be overlooked."""

from __future__ import annotations

import json
from collections import Counter

import pytest

pytest.importorskip("rich")

from tests.support.attacks.hard_conditions import CONDITIONS
from tests.support.attacks.hub_faults import faults
from tests.support.attacks.hub_lies import lies
from tests.support.attacks.tampered_builds import BUILDS
from tests.support.attacks.tampered_caches import CACHES
from tests.support.hub_clients import write_variant
from tools.attacks import __main__ as program
from tools.attacks import page
from tools.attacks.groups import Attack
from tools.build.source_tree import read_revision

SURVIVED = Attack("group", "one", True, False, "refused")
MISSED = Attack("group", "two", False, None, "loaded [it]")


def test_the_page_is_made_of_the_results():
    assert page.PAGE.read_text() == page.page(json.loads(page.RESULTS.read_text()))


def test_the_results_are_of_all_groups_and_no_attack_was_missed():
    groups = json.loads(page.RESULTS.read_text())["groups"]
    assert {*groups} == {*page.ABOUT, "all"}
    assert all(counted["survived"] == counted["tried"] for counted in groups.values())


def test_the_results_have_as_many_attacks_as_there_are(tmp_path):
    """Who adds one runs them all again."""
    variant = write_variant(tmp_path / "build/torch-cpu", "0ddba11", 2)
    there = Counter(lie.group for lie in (*faults(), *lies(variant, tmp_path / "outside", "0" * 40)))
    there |= {"tampered caches": len(CACHES), "tampered builds": len(BUILDS), "hard conditions": len(CONDITIONS)}
    groups = json.loads(page.RESULTS.read_text())["groups"]
    assert {group: counted["tried"] for group, counted in groups.items()} == {**there, "all": there.total()}


def test_the_page_names_the_commit_of_the_results():
    results = json.loads(page.RESULTS.read_text())
    named = page.page({**results, "commit": "0123456789ab" + 28 * "c", "dirty": True})
    assert ",\nof commit `0123456789ab`, with uncommitted changes.\n" in named
    assert f",\nof commit `{'c' * 12}`.\n" in page.page({**results, "commit": "c" * 40, "dirty": False})


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
    revision = read_revision(program.ROOT, ())
    results = json.loads(page.RESULTS.read_text())
    assert (results["commit"], results["dirty"]) == (revision.commit, revision.dirty)
