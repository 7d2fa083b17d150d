"""What generated pages share: which file of results they show, and that they are written together or not at all."""

from __future__ import annotations

import sys

import pytest

from tools.pages.generated import newest, write_or_check


def test_the_newest_file_of_a_kind_is_shown(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"recipes-\*\.json of `python -m examples\.recipes` in "):
        newest(tmp_path, "recipes", "examples.recipes")
    for name in ("recipes-2026-11-27.json", "recipes-2026-11-03.json", "speeds-2026-11-28.json"):
        (tmp_path / name).touch()
    assert newest(tmp_path, "recipes", "examples.recipes").name == "recipes-2026-11-27.json"


def test_pages_are_written_unless_they_are_only_to_be_checked(tmp_path, monkeypatch):
    pages = {tmp_path / "index.md": "of all", tmp_path / "parts" / "one.md": "of one"}

    def status(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["page", *arguments])
        return write_or_check(pages, "Make pages.")

    assert status("--check") == 1 and not list(tmp_path.iterdir())
    assert status() == 0 and {page: page.read_text() for page in pages} == pages
    assert status("--check") == 0
    for page, content in pages.items():
        page.write_text("older")
        assert status("--check") == 1 and page.read_text() == "older"
        page.write_text(content)
