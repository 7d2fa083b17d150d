"""The store of tools/hub/store.py: commits by content, whole or not at all, one after the other."""

from __future__ import annotations

import threading

import pytest

from tools.hub.store import Blob, Change, HubError, Proposal, Store, apply_changes


def proposal(*changes: Change, parent: str | None = None) -> Proposal:
    return Proposal("title", "", parent, list(changes))


def test_concurrent_commits_follow_each_other(tmp_path):
    repository = Store(tmp_path).create("org", "tiny")
    changes = [proposal(Change(f"file{i}", b"%d" % i)) for i in range(16)]
    threads = [threading.Thread(target=repository.commit, args=("main", change)) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    commit = repository.resolve("main")
    assert set(commit.files) == {f"file{i}" for i in range(16)}
    sizes = []
    while commit.parent:
        sizes.append(len(commit.files))
        commit = repository.resolve(commit.parent)
    assert sizes == list(range(16, 0, -1))


def test_equal_histories_have_equal_commit_ids(tmp_path):
    ids = [Store(tmp_path / name).create("org", name).commit("main", proposal(Change("a", b"1"))).sha for name in "xy"]
    assert ids[0] == ids[1] and len(ids[0]) == 40


@pytest.mark.parametrize("other", [proposal(Change("a", b"2")), proposal(Change("b", b"1"))])
def test_another_content_has_another_commit_id(tmp_path, other):
    ids = [
        Store(tmp_path / name).create("org", "tiny").commit("main", change).sha
        for name, change in [("x", proposal(Change("a", b"1"))), ("y", other)]
    ]
    assert ids[0] != ids[1]


def test_a_refused_commit_leaves_nothing_on_disk(tmp_path):
    repository = Store(tmp_path).create("org", "tiny")
    before = sorted(tmp_path.rglob("*"))
    for refused in (
        proposal(Change("new", b"new"), Change("absent", None)),
        proposal(Change("new", b"new"), Change("../out", b"")),
        proposal(Change("new", b"new"), parent="0" * 40),
    ):
        with pytest.raises(HubError):
            repository.commit("main", refused)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_crash_before_the_last_step_leaves_the_old_commit(tmp_path, monkeypatch):
    repository = Store(tmp_path).create("org", "tiny")
    before = repository.resolve("main")
    monkeypatch.setattr(type(repository), "write_refs", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        repository.commit("main", proposal(Change("a", b"1")))
    assert Store(tmp_path).repository("org", "tiny").resolve("main") == before


def test_changes_are_made_in_their_order():
    files = {"d/a": Blob("1", 1), "d/b": Blob("2", 1), "keep": Blob("3", 1)}
    after = apply_changes([Change("d/", None), Change("d/a", b"new")], files)
    assert set(after) == {"d/a", "keep"} and after["d/a"].size == 3


def test_a_tag_and_a_branch_do_not_share_a_name(tmp_path):
    repository = Store(tmp_path).create("org", "tiny")
    repository.add_ref("tags", "1.0", "main")
    for kind in ("heads", "tags"):
        with pytest.raises(HubError, match=r"refs/tags/1\.0 exists already"):
            repository.add_ref(kind, "1.0", "main")


def test_no_path_of_a_file_is_a_path_on_this_disk(tmp_path):
    repository = Store(tmp_path).create("org", "tiny")
    repository.commit("main", proposal(Change("some/file", b"1")))
    assert not [path for path in tmp_path.rglob("*") if path.name in ("some", "file")]
