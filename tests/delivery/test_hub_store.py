"""The store of tools/hub/store.py: commits by content, whole or not at all."""

from __future__ import annotations

import pytest
from dulwich.refs import DiskRefsContainer

from tools.hub.store import Change, HubError, Repository, Store


def new_repository(folder) -> Repository:
    store = Store(folder)
    assert store.create("org/tiny")
    return store.repository("org/tiny")


def test_a_repository_whose_creation_broke_off_can_be_created(tmp_path, monkeypatch):
    monkeypatch.setattr(Repository, "start", lambda self: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Store(tmp_path).create("org/tiny")
    monkeypatch.undo()
    assert new_repository(tmp_path).refs().keys() == {"refs/heads/main"}
    assert Store(tmp_path).create("org/tiny") is False


@pytest.mark.parametrize("path, content, equal", [("a", b"1", True), ("a", b"2", False), ("b", b"1", False)])
def test_equal_histories_have_equal_commit_ids(tmp_path, path, content, equal):
    first = new_repository(tmp_path / "x").commit("main", "title", [Change("a", b"1")])
    second = new_repository(tmp_path / "y").commit("main", "title", [Change(path, content)])
    assert (first == second) is equal


def test_a_crash_before_the_last_step_leaves_the_old_commit(tmp_path, monkeypatch):
    repository = new_repository(tmp_path)
    before = repository.refs()
    monkeypatch.setattr(DiskRefsContainer, "__setitem__", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        repository.commit("main", "title", [Change("a", b"1")])
    monkeypatch.undo()
    assert Store(tmp_path).repository("org/tiny").refs() == before


def test_a_folder_can_be_replaced_in_one_commit(tmp_path):
    repository = new_repository(tmp_path)
    repository.commit("main", "title", [Change("d/a", b"1"), Change("d/b", b"2"), Change("keep", b"3")])
    sha = repository.commit("main", "title", [Change("d", None), Change("d/a", b"new")])
    entries = repository.entries(sha)
    assert set(entries) == {"d", "d/a", "keep"} and repository.read(entries["d/a"]) == b"new"


@pytest.mark.parametrize("kind", ["heads", "tags"])
def test_a_tag_and_a_branch_do_not_share_a_name(tmp_path, kind):
    repository = new_repository(tmp_path)
    repository.add_ref("refs/tags/1.0", "main")
    with pytest.raises(HubError, match=r"1\.0 exists already"):
        repository.add_ref(f"refs/{kind}/1.0", "main")


def test_no_branch_hides_a_commit_that_has_its_name(tmp_path):
    repository = new_repository(tmp_path)
    first = repository.resolve("main")
    second = repository.commit("main", "title", [Change("a", b"1")])
    repository.add_ref(f"refs/heads/{first}", second)
    assert repository.resolve(first) == first
    repository.add_ref("refs/heads/a-name-of-20-letters", second)
    assert repository.resolve("a-name-of-20-letters") == second
