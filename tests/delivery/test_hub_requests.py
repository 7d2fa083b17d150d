"""Requests to the Hub of tools/hub that its clients would not send: each gets an error, and changes nothing."""

from __future__ import annotations

import hashlib
import http.client
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tools.hub.server import Hub

API = "/api/kernels/org/tiny"
CREATE = "/api/repos/create"
TINY = {"type": "kernel", "organization": "org", "name": "tiny"}
COMMIT = f"{API}/commit/main"
THERE = "/kernels/org/tiny/resolve/main/there"
HEADER = {"key": "header", "value": {"summary": "one file"}}


def added(path, content="eA=="):
    return {"key": "file", "value": {"path": path, "content": content, "encoding": "base64"}}


def deleted(path):
    return {"key": "deletedFile", "value": {"path": path}}


def send(hub, method: str, path: str, body: bytes = b"", **headers: str):
    """Return status, headers and body of the answer to a request whose path is sent as it is, unlike a client's."""
    connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"), timeout=10)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    answer = response.status, response.headers, response.read()
    connection.close()
    return answer


def post(hub, path: str, *lines):
    return send(hub, "POST", path, "\n".join(map(json.dumps, lines)).encode())


def get(hub, path: str):
    return json.loads(send(hub, "GET", path)[2])


def start(hub) -> None:
    """Make org/tiny, whose main has the file `there`."""
    assert post(hub, CREATE, TINY)[0] == 200
    assert post(hub, COMMIT, HEADER, added("there", "MDEyMzQ1Njc4OQ=="))[0] == 200


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with Hub(tmp_path_factory.mktemp("hub")) as hub:
        start(hub)
        yield hub


@pytest.fixture
def unchanged(hub):
    """Check that the test leaves all branches and tags where they are."""
    before = get(hub, f"{API}/refs")
    yield
    assert get(hub, f"{API}/refs") == before


OUTSIDE = ["../out", "/etc/passwd", "a/../../out", "a//b", "./a", "a/.", "", "a/", "a\\..\\b", "a\0b", "a\nb", ".git/x"]


@pytest.mark.parametrize("path", OUTSIDE, ids=ascii)
def test_a_path_outside_the_folder_is_not_committed(hub, unchanged, path):
    assert post(hub, COMMIT, HEADER, added(path))[0] == 400


@pytest.mark.parametrize(
    "path, code",
    [
        ("/kernels/org/tiny/resolve/main/../../../config", "EntryNotFound"),
        ("/kernels/org/tiny/resolve/main/%2e%2e/config", "EntryNotFound"),
        ("/kernels/org/tiny/resolve/main/%2Fetc%2Fpasswd", "EntryNotFound"),
        ("/kernels/org/tiny/resolve/..%2f..%2fmain/there", "RevisionNotFound"),
        ("/kernels/org/tiny/resolve/config/there", "RevisionNotFound"),
        ("/kernels/%2e%2e/tiny/resolve/main/there", "RepoNotFound"),
        ("/kernels/org/%2e%2e%2ftiny/resolve/main/there", "RepoNotFound"),
        ("/kernels/org/./tiny/resolve/main/there", None),
        (f"{API}/revision/refs%2Fheads%2F..%2F..%2Fconfig", "RevisionNotFound"),
        (f"{API}/tree/main/..", "EntryNotFound"),
        ("/api/organizations/%2e%2e/overview", None),
        ("/../../etc/passwd", None),
    ],
)
def test_a_path_outside_the_folder_is_not_read(hub, path, code):
    status, headers, _ = send(hub, "GET", path)
    assert (status, headers["X-Error-Code"]) == (404, code)


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (["not", "a", "header"],),
        (added("a"),),
        (HEADER, {"key": "lfsFile", "value": {"path": "a", "algo": "sha256", "oid": "0" * 64, "size": 1}}),
        (HEADER, added("a", content="not base64!")),
        (HEADER, added("a"), added("a/b")),
        (HEADER, added("there/b")),
        (HEADER, added("new"), deleted("there"), deleted("absent")),
        ({"key": "header", "value": {"summary": "one file", "parentCommit": "0" * 40}}, added("new")),
    ],
    ids=lambda lines: str(lines)[-40:],
)
def test_a_commit_is_applied_whole_or_not_at_all(hub, unchanged, lines):
    assert post(hub, COMMIT, *lines)[0] >= 400


@pytest.mark.parametrize(
    "path, content",
    [
        (CREATE, {**TINY, "type": "model"}),
        (CREATE, {**TINY, "organization": None}),
        (CREATE, {**TINY, "organization": ".."}),
        (CREATE, {**TINY, "name": "a/../b"}),
        (f"{API}/branch/..%2Fv1", {}),
        (f"{API}/tag/main", {"tag": "a..b"}),
        (f"{API}/tag/main", {"tag": ""}),
    ],
)
def test_a_name_that_is_none_on_the_real_hub_is_refused(hub, unchanged, path, content):
    assert post(hub, path, content)[0] == 400


@pytest.mark.parametrize("headers", [{"Host": "hub.example.com"}, {"Origin": "https://example.com"}], ids=str)
def test_what_a_web_page_could_send_is_refused(hub, unchanged, headers):
    line = "\n".join(map(json.dumps, (HEADER, added("new")))).encode()
    assert send(hub, "POST", COMMIT, line, **headers)[0] in (400, 403)
    assert send(hub, "GET", API, **headers)[0] in (400, 403)


def test_a_pull_request_is_no_commit_to_the_branch(hub, unchanged):
    assert post(hub, f"{COMMIT}?create_pr=1", HEADER, added("new"))[0] == 400


def test_head_and_get_name_the_commit_and_git_s_blob_id(hub):
    (_, headers, body), (_, head, nothing) = send(hub, "GET", THERE), send(hub, "HEAD", THERE)
    assert (body, nothing) == (b"0123456789", b"")
    for fields in headers, head:
        assert fields["ETag"] == f'"{hashlib.sha1(b"blob 10" + bytes(1) + body).hexdigest()}"'
        assert (fields["X-Repo-Commit"], fields["Content-Length"]) == (get(hub, API)["sha"], "10")


def test_concurrent_commits_follow_each_other(tmp_path):
    names = {f"file{i}" for i in range(16)}
    with Hub(tmp_path) as hub:
        start(hub)
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda name: post(hub, COMMIT, HEADER, added(name)), names))
        trees = [get(hub, f"{API}/tree/{json.loads(body)['commitOid']}") for _, _, body in answers]
        assert {entry["path"] for entry in get(hub, f"{API}/tree/main")} == names | {"there"}
    assert sorted(map(len, trees)) == list(range(2, 18))


def test_a_restarted_hub_serves_the_same_commits(tmp_path):
    with Hub(tmp_path) as hub:
        start(hub)
        before = get(hub, f"{API}/refs")
    with Hub(tmp_path) as hub:
        assert get(hub, f"{API}/refs") == before
        assert send(hub, "GET", THERE)[2] == b"0123456789"
        assert post(hub, CREATE, TINY)[0] == 409
