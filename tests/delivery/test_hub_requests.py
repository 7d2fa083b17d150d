"""Requests to the Hub of tools/hub that its clients would not send: each gets an error, and changes nothing."""

from __future__ import annotations

import http.client
import json
import socket

import pytest

from tools.hub.server import Hub
from tools.hub.store import Repository

API = "/api/kernels/org/tiny"
CREATE = "/api/repos/create"
TINY = {"type": "kernel", "organization": "org", "name": "tiny"}
COMMIT = f"{API}/commit/main"
HEADER = {"key": "header", "value": {"summary": "one file"}}
ADDED = {"key": "file", "value": {"path": "there", "content": "MDEyMzQ1Njc4OQ==", "encoding": "base64"}}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with org/tiny, whose main has the file `there` of ten bytes."""
    with Hub(tmp_path_factory.mktemp("hub")) as hub:
        assert post(hub, CREATE, TINY)[0] == 200
        assert post(hub, COMMIT, [HEADER, ADDED])[0] == 200
        yield hub


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
        (CREATE, {**TINY, "type": "model"}),
        (CREATE, {**TINY, "organization": None}),
        (CREATE, {**TINY, "organization": ".."}),
        (CREATE, {**TINY, "name": "a/../b"}),
        (CREATE, {**TINY, "name": "a" * 97}),
        (CREATE, {**TINY, "name": ["other"]}),
        (CREATE, ["not an object"]),
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
        ("POST", f"{COMMIT}?create_pr=1", {}, 400),
        ("POST", COMMIT, {"Origin": "https://example.com"}, 403),
        ("GET", "/kernels/org/tiny/resolve/main/there", {"Range": "bytes=10-"}, 416),
    ],
)
def test_a_request_that_no_client_sends_is_refused(hub, method, path, headers, status):
    refuse(hub, send(hub, method, path, headers=headers), status)


def test_a_request_that_breaks_off_is_refused(hub):
    half = f"POST {COMMIT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n["
    for text in (half, "?\r\n", "GET / HTTP/nine\r\n\r\n"):
        with socket.create_connection(hub.endpoint.removeprefix("http://").split(":"), timeout=10) as connection:
            connection.sendall(text.encode())
            connection.shutdown(socket.SHUT_WR)
            answer = connection.makefile("rb").read()
        assert b" 400 " in answer.splitlines()[0]
        assert b'{"error": ' in answer and b"Traceback" not in answer


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


def test_a_fault_of_the_server_is_told_without_its_traceback(hub, monkeypatch, capfd):
    monkeypatch.setattr(Repository, "refs", lambda self: 1 / 0)
    status, _, body = send(hub, "GET", f"{API}/refs")
    assert (status, json.loads(body)) == (500, {"error": "the server failed; its console says why"})
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_restarted_hub_serves_the_same_commits(tmp_path):
    with Hub(tmp_path) as hub:
        post(hub, CREATE, TINY)
        post(hub, COMMIT, [HEADER, ADDED])
        before = send(hub, "GET", f"{API}/refs")[2]
    with Hub(tmp_path) as hub:
        assert send(hub, "GET", f"{API}/refs")[2] == before
        assert send(hub, "GET", "/kernels/org/tiny/resolve/main/there")[2] == b"0123456789"
        assert post(hub, CREATE, TINY)[0] == 409
