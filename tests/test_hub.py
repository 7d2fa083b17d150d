"""The Hub of tools/hub.py, to the real clients and to requests that no client would send."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from pathlib import Path

import pytest
from hub import Hub
from hub_clients import environment, run_client, write_variant
from hub_store import Blob, Change, HubError, Proposal, Store, apply_changes

ONLINE = """
import contextlib, io, json, sys
from pathlib import Path
import kernels, torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion
from kernels.cli.versions import print_kernel_versions
from kernels.locking import lock_kernel_tree

old, new, lock_file = map(Path, sys.argv[1:])
api, repo, kind = HfApi(), "org/tiny", {"repo_type": "kernel"}


def additions(variant):
    return [CommitOperationAdd(f"build/{variant.name}/{f.name}", f) for f in sorted(variant.iterdir())]


def error(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as e:
        return type(e).__name__


def loaded(**options):
    kernel = kernels.get_kernel(options.pop("repo_id", repo), **options)
    return [kernel.scale(torch.ones(1)).item(), kernel.ops.name]


seen = {"created": api.create_repo(repo, **kind), "created again": api.create_repo(repo, exist_ok=True, **kind)}
api.create_branch(repo, branch="v1", **kind)
first = api.create_commit(repo, additions(old), commit_message="old", revision="v1", **kind).oid
api.create_tag(repo, tag="1.0", revision=first, **kind)
seen["unchanged"] = api.create_commit(repo, additions(old), commit_message="x", revision="v1", **kind).oid
second = api.upload_folder(
    folder_path=new.parent, path_in_repo="build", repo_id=repo, revision="v1", delete_patterns="*", **kind
).oid
change = [CommitOperationAdd("README.md", b"# proposed")]
proposed = api.create_commit(repo, change, commit_message="x", revision="v1", create_pr=True, **kind)
seen |= {"first": first, "second": second, "proposed": [proposed.oid, proposed.pr_revision]}
seen["proposed files"] = api.list_repo_files(repo, revision="refs/pr/1", **kind)
refs = api.list_repo_refs(repo, include_pull_requests=True, **kind)
seen["refs"] = {r.ref: r.target_commit for r in refs.branches + refs.tags + refs.pull_requests}
seen["main files"] = api.list_repo_files(repo, **kind)
seen["errors"] = [
    error(api.create_repo, repo, **kind),
    error(api.repo_info, "org/absent", **kind),
    error(api.repo_info, repo, revision="absent", **kind),
    error(api.hf_hub_download, repo, "absent", revision="v1", **kind),
    error(api.create_commit, repo, change, commit_message="x", revision=first, **kind),
    error(api.create_commit, repo, change, commit_message="x", revision="v1", parent_commit=first, **kind),
    error(api.create_commit, repo, [CommitOperationDelete("absent")], commit_message="x", **kind),
]

dependency = KernelDependency(repo_id=repo, version=KernelVersion.Version(1))
lock_file.write_text(KernelLocks(locks={dependency: KernelLock(commit=first)}).to_json())
seen["locked"] = next(iter(lock_kernel_tree(dependency, api=api).values())).commit
seen["by version"] = loaded(version=1)
seen["by commit"] = loaded(revision=first)
seen["by tag"] = loaded(revision="1.0")
locked = kernels.get_locked_kernel(repo, lockfile=lock_file)
seen["by lock"] = [locked.scale(torch.ones(1)).item(), locked.ops.name]
seen["has"] = [kernels.has_kernel(repo, version=1), kernels.has_kernel(repo, revision=first)]
seen["variants"] = [d.variant.variant_str for d in kernels.get_kernel_variants(repo, version=1)]
with contextlib.redirect_stdout(io.StringIO()) as out:
    print_kernel_versions(repo)
seen["versions"] = out.getvalue()

api.create_repo("stranger/tiny", **kind)
api.create_commit("stranger/tiny", additions(old), commit_message="old", **kind)
seen["untrusted"] = error(loaded, repo_id="stranger/tiny", revision="main")
seen["allowed"] = loaded(repo_id="stranger/tiny", revision="main", trust_remote_code=["stranger/tiny"])

for revision in ("v1", first):
    snapshot_download(repo, revision=revision, **kind)
print(json.dumps(seen))
"""

OFFLINE = """
import json, sys
import kernels, torch
ones, lock_file = torch.ones(1), sys.argv[1]
locked = kernels.load_kernel("org/tiny", lockfile=lock_file)
latest = kernels.get_kernel("org/tiny", version=1)
print(json.dumps({"locked": locked.scale(ones).item(), "latest": latest.scale(ones).item()}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the clients saw: one session with a Hub, and one more, offline, after the Hub is gone."""
    folder = tmp_path_factory.mktemp("hub")
    old = write_variant(folder / "old/build/torch-universal", "aaaaaaa", factor=2)
    (old / "removed.py").touch()
    new = write_variant(folder / "new/build/torch-universal", "bbbbbbb", factor=3)
    with Hub(folder / "hub", trusted=["org"]) as hub:
        variables = environment(hub.endpoint, folder / "home")
        online = run_client(ONLINE, [old, new, folder / "kernels.lock"], variables)
    offline = run_client(OFFLINE, [folder / "kernels.lock"], {**variables, "HF_HUB_OFFLINE": "1"})
    return {**online, "offline": offline, "endpoint": hub.endpoint}


def test_a_repository_is_created_once(seen):
    assert seen["created"] == seen["created again"] == f"{seen['endpoint']}/kernels/org/tiny"


def test_branches_tags_and_pull_requests_name_commits(seen):
    assert seen["refs"].pop("refs/heads/main") not in (seen["first"], seen["second"])
    commit, ref = seen["proposed"]
    assert seen["refs"] == {"refs/heads/v1": seen["second"], "refs/tags/1.0": seen["first"], ref: commit}


def test_a_commit_on_one_branch_leaves_the_others_alone(seen):
    assert seen["main files"] == []


def test_a_pull_request_holds_the_branch_and_the_change(seen):
    files = {f"build/torch-universal/{name}" for name in ("__init__.py", "_ops.py", "metadata.json")}
    assert set(seen["proposed files"]) == files | {"README.md"}


def test_files_that_have_not_changed_make_no_commit(seen):
    assert seen["unchanged"] == seen["first"]


def test_the_clients_recognize_every_error(seen):
    assert seen["errors"] == [
        "HfHubHTTPError",
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
        "RemoteEntryNotFoundError",
        "RevisionNotFoundError",
        "HfHubHTTPError",
        "RemoteEntryNotFoundError",
    ]


def test_a_kernel_loads_by_version_commit_tag_and_lock_file(seen):
    old, new = [2.0, "_tiny_aaaaaaa"], [3.0, "_tiny_bbbbbbb"]
    assert (seen["by version"], seen["by commit"], seen["by tag"], seen["by lock"]) == (new, old, old, old)


def test_a_kernel_is_found_and_listed(seen):
    assert seen["has"] == [True, True]
    assert seen["variants"] == ["torch-universal"]
    assert "Version 1" in seen["versions"] and "torch-universal compatible, preferred" in seen["versions"]


def test_kernels_lock_takes_the_head_of_the_version(seen):
    assert seen["locked"] == seen["second"]


def test_only_trusted_organizations_load_without_consent(seen):
    assert seen["untrusted"] == "ValueError"
    assert seen["allowed"] == [2.0, "_tiny_aaaaaaa"]


def test_a_whole_snapshot_loads_without_a_hub(seen):
    assert seen["offline"] == {"locked": 2.0, "latest": 3.0}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with org/tiny, whose main has the file `there` of ten bytes."""
    with Hub(tmp_path_factory.mktemp("hub")) as hub:
        assert post(hub, "/api/repos/create", {"type": "kernel", "organization": "org", "name": "tiny"})[0] == 200
        assert post(hub, COMMIT, [HEADER, ADDED])[0] == 200
        yield hub


API = "/api/kernels/org/tiny"
COMMIT = f"{API}/commit/main"
HEADER = {"key": "header", "value": {"summary": "one file"}}
ADDED = {"key": "file", "value": {"path": "there", "content": "MDEyMzQ1Njc4OQ==", "encoding": "base64"}}


def send(hub, method: str, path: str, body: bytes = b"", headers: dict | None = None):
    """Return status, headers and body of the answer to a request that is sent as it is, unlike a client's."""
    connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"), timeout=10)
    connection.putrequest(method, path, skip_host="Host" in (headers or {}))
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    answer = response.status, response.headers, response.read()
    connection.close()
    return answer


def post(hub, path: str, content):
    lines = content if isinstance(content, list) else [content]
    return send(hub, "POST", path, "\n".join(map(json.dumps, lines)).encode())


def refuse(hub, answer, status: int, code: str | None = None):
    """Check an error's form, and that it changed nothing and left the server at work."""
    assert answer[0] == status, answer
    assert answer[1]["X-Error-Code"] == code
    error = json.loads(answer[2])["error"]
    assert error and "Traceback" not in error
    head = json.loads(send(hub, "GET", API)[2])["sha"]
    assert [entry["path"] for entry in json.loads(send(hub, "GET", f"{API}/tree/{head}")[2])] == ["there"]


def added(path, content="eA==", encoding="base64"):
    return {"key": "file", "value": {"path": path, "content": content, "encoding": encoding}}


OUTSIDE = ["../out", "/etc/passwd", "a/../../out", "a//b", "./a", "a/.", "", "a/", "a\\..\\b", "a\0b", ".git/config"]


@pytest.mark.parametrize("path", [*OUTSIDE, "a\nb", "\ud800", "a" * 1025], ids=lambda path: ascii(path)[:20])
def test_a_path_outside_the_folder_is_not_committed(hub, path):
    refuse(hub, post(hub, COMMIT, [HEADER, added(path)]), 400)
    refuse(hub, post(hub, f"{API}/preupload/main", {"files": [{"path": path}]}), 400)


@pytest.mark.parametrize(
    "path, status, code",
    [
        ("/kernels/org/tiny/resolve/main/../../../refs.json", 400, None),
        ("/kernels/org/tiny/resolve/main/%2e%2e/refs.json", 400, None),
        ("/kernels/org/tiny/resolve/main/%2Fetc%2Fpasswd", 400, None),
        ("/kernels/org/tiny/resolve/main//etc/passwd", 400, None),
        ("/kernels/org/tiny/resolve/main/a%00b", 400, None),
        ("/kernels/org/tiny/resolve/main/a%5Cb", 400, None),
        ("/kernels/org/tiny/resolve/main/%ff", 400, None),
        ("/kernels/org/tiny/resolve/main/absent", 404, "EntryNotFound"),
        ("/kernels/org/tiny/resolve/..%2f..%2fmain/there", 404, "RevisionNotFound"),
        ("/kernels/org/tiny/resolve/%2e%2e/there", 404, "RevisionNotFound"),
        ("/kernels/%2e%2e/tiny/resolve/main/there", 400, None),
        ("/kernels/org/%2e%2e%2ftiny/resolve/main/there", 400, None),
        ("/kernels/org/ti%00ny/resolve/main/there", 400, None),
        ("/api/kernels/org/absent", 404, "RepoNotFound"),
        ("/api/kernels/../refs", 400, None),
        (f"{API}/revision/refs%2Fheads%2F..%2Fmain", 404, "RevisionNotFound"),
        (f"{API}/tree/main/..", 400, None),
        (f"{API}/tree/main/absent", 404, "EntryNotFound"),
        ("/api/organizations/%2e%2e/overview", 404, None),
        ("/api/organizations/absent/overview", 404, None),
        ("/../../etc/passwd", 404, None),
        ("//[", 404, None),
        ("/", 404, None),
    ],
)
def test_a_path_outside_the_folder_is_not_read(hub, path, status, code):
    refuse(hub, send(hub, "GET", path), status, code)


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"not JSON",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        [{"key": "header"}],
        [{"key": "header", "value": {"summary": ""}}],
        [{"key": "header", "value": {"summary": 1}}],
        [added("a")],
        [HEADER, {"key": "file", "value": None}],
        [HEADER, {"key": "file", "value": {"path": 7}}],
        [HEADER, {"key": "unheard of", "value": {"path": "a"}}],
        [HEADER, {"key": "lfsFile", "value": {"path": "a", "algo": "sha256", "oid": "0" * 64, "size": 1}}],
        [HEADER, added("a", content="not base64!")],
        [HEADER, added("a", content="eA")],
        [HEADER, added("a", encoding="utf-8")],
        [HEADER, added("a"), added("a/b")],
        [HEADER, added("there/b")],
    ],
    ids=lambda lines: str(lines)[-40:],
)
def test_a_malformed_commit_is_refused(hub, lines):
    answer = send(hub, "POST", COMMIT, lines) if isinstance(lines, bytes) else post(hub, COMMIT, lines)
    refuse(hub, answer, 400)


@pytest.mark.parametrize("key", ["deletedFile", "deletedFolder"])
def test_a_commit_is_applied_whole_or_not_at_all(hub, key):
    lines = [HEADER, added("new"), {"key": "deletedFile", "value": {"path": "there"}}]
    lines.append({"key": key, "value": {"path": "absent"}})
    refuse(hub, post(hub, COMMIT, lines), 404, "EntryNotFound")


@pytest.mark.parametrize(
    "path, content",
    [
        ("/api/repos/create", {"type": "model", "organization": "org", "name": "other"}),
        ("/api/repos/create", {"type": "kernel", "organization": None, "name": "other"}),
        ("/api/repos/create", {"type": "kernel", "organization": "..", "name": "other"}),
        ("/api/repos/create", {"type": "kernel", "organization": "org", "name": "a/../b"}),
        ("/api/repos/create", {"type": "kernel", "organization": "org", "name": "a" * 97}),
        ("/api/repos/create", {"type": "kernel", "organization": "org", "name": ["other"]}),
        ("/api/repos/create", ["not an object"]),
        ("/api/validate-yaml", {}),
        (f"{API}/preupload/main", {"files": ["there"]}),
        (f"{API}/preupload/main", {"files": {"path": "there"}}),
        (f"{API}/branch/..%2Fv1", {}),
        (f"{API}/branch/refs%2Fheads%2Fv1", {}),
        (f"{API}/branch/{'0' * 40}", {}),
        (f"{API}/tag/main", {}),
        (f"{API}/tag/main", {"tag": "a..b"}),
        (f"{API}/tag/main", {"tag": "-a"}),
    ],
)
def test_a_malformed_request_is_refused(hub, path, content):
    refuse(hub, post(hub, path, content), 400)


@pytest.mark.parametrize(
    "method, path, headers, status",
    [
        ("POST", COMMIT, {"Content-Length": None}, 411),
        ("POST", COMMIT, {"Content-Length": None, "Transfer-Encoding": "chunked"}, 411),
        ("POST", COMMIT, {"Content-Length": "-1"}, 400),
        ("POST", COMMIT, {"Content-Length": "many"}, 400),
        ("POST", COMMIT, {"Content-Length": str(1 << 40)}, 413),
        ("POST", f"{API}/preupload/main", {"Content-Length": str(1 << 23)}, 413),
        ("GET", COMMIT, {}, 405),
        ("PUT", COMMIT, {}, 405),
        ("DELETE", API, {}, 405),
        ("POST", API, {}, 405),
        ("UNHEARD", API, {}, 405),
        ("GET", API, {"Host": "hub.example.com"}, 403),
        ("POST", COMMIT, {"Origin": "https://example.com"}, 403),
        ("GET", "/kernels/org/tiny/resolve/main/there", {"Range": "bytes=10-"}, 416),
    ],
)
def test_a_request_that_no_client_sends_is_refused(hub, method, path, headers, status):
    refuse(hub, send(hub, method, path, headers=headers), status)


def test_a_request_that_breaks_off_is_refused(hub):
    address = hub.endpoint.removeprefix("http://").split(":")
    for text, status in [(f"POST {COMMIT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n[", b"400"), ("?\r\n", b"400")]:
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(text.encode())
            connection.shutdown(socket.SHUT_WR)
            answer = connection.makefile("rb").read()
        assert status in answer and b'{"error": ' in answer and b"Traceback" not in answer


@pytest.mark.parametrize("wanted, part", [("bytes=3-5", b"345"), ("bytes=7-", b"789"), ("bytes=0-99", b"0123456789")])
def test_a_download_can_be_resumed(hub, wanted, part):
    status, headers, body = send(hub, "GET", "/kernels/org/tiny/resolve/main/there", headers={"Range": wanted})
    assert (status, body) == (206, part)
    first = int(wanted[6])
    assert headers["Content-Range"] == f"bytes {first}-{first + len(part) - 1}/10"


def test_head_is_get_without_the_body(hub):
    path = "/kernels/org/tiny/resolve/main/there"
    (status, got, _), (same, head, body) = send(hub, "GET", path), send(hub, "HEAD", path)
    assert (same, body) == (status, b"")
    assert {name: head[name] for name in ("ETag", "X-Repo-Commit", "Content-Length")} == {
        name: got[name] for name in ("ETag", "X-Repo-Commit", "Content-Length")
    }


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.168.0.1", "example.com"])
def test_only_this_machine_is_served(tmp_path, host):
    with pytest.raises(ValueError, match=r"need 127\.0\.0\.1"):
        Hub(tmp_path, host=host)


def proposal(*changes: Change, parent: str | None = None) -> Proposal:
    return Proposal("title", "", parent, list(changes))


def test_a_restarted_hub_serves_the_same_commits(tmp_path):
    with Hub(tmp_path) as hub:
        post(hub, "/api/repos/create", {"type": "kernel", "organization": "org", "name": "tiny"})
        post(hub, COMMIT, [HEADER, ADDED])
        before = send(hub, "GET", f"{API}/refs")[2]
    with Hub(tmp_path) as hub:
        assert send(hub, "GET", f"{API}/refs")[2] == before
        assert send(hub, "GET", "/kernels/org/tiny/resolve/main/there")[2] == b"0123456789"
        assert post(hub, "/api/repos/create", {"type": "kernel", "organization": "org", "name": "tiny"})[0] == 409


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
    ids = [
        Store(tmp_path / name).create("org", name).commit("main", proposal(Change("a", b"1")))[0].sha for name in "xy"
    ]
    assert ids[0] == ids[1] and len(ids[0]) == 40


@pytest.mark.parametrize("other", [proposal(Change("a", b"2")), proposal(Change("b", b"1"))])
def test_another_content_has_another_commit_id(tmp_path, other):
    ids = [
        Store(tmp_path / name).create("org", "tiny").commit("main", change)[0].sha
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
    assert not [path for path in Path(tmp_path).rglob("*") if path.name in ("some", "file")]
