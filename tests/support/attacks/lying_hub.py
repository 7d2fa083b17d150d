"""A Hub that lies: a relay in front of an honest Hub, which spoils the answers that a case names.

The honest Hub stays as it is. The relay asks it, hands its answer to what the case has for that endpoint, and sends
what comes back, byte by byte: also what no framework would send, as half a body or nothing at all.
"""

from __future__ import annotations

import http.client
import re
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

# What a client of kernels asks for, by method and path.
ENDPOINTS = {
    "refs": re.compile(r"GET /api/kernels/[^/]+/[^/]+/refs$"),
    "revision": re.compile(r"GET /api/kernels/[^/]+/[^/]+(/revision/(?P<revision>[^/]+))?$"),
    "tree": re.compile(r"GET /api/kernels/[^/]+/[^/]+/tree/(?P<revision>[^/]+)(/(?P<path>.*))?$"),
    "head": re.compile(r"HEAD /kernels/[^/]+/[^/]+/resolve/(?P<revision>[^/]+)/(?P<path>.+)$"),
    "get": re.compile(r"GET /kernels/[^/]+/[^/]+/resolve/(?P<revision>[^/]+)/(?P<path>.+)$"),
    "overview": re.compile(r"GET /api/organizations/[^/]+/overview$"),
}
# Longer than every client in a test waits; the relay stops waiting when the client hangs up.
FOREVER = 60.0


@dataclass(frozen=True)
class Asked:
    """A request: its endpoint, the file or folder and the revision that it names (decoded, "" if none), and its URL."""

    endpoint: str
    path: str
    revision: str
    url: str


@dataclass(frozen=True)
class Answer:
    """What is sent. Header names are lower-case; a missing content-length is filled in.

    `raw`, if it is not None, is sent instead of everything else, before the connection is closed; `wait` is in seconds.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    raw: bytes | None = None
    wait: float = 0.0

    def with_headers(self, **changes: str | None) -> Answer:
        """Return this answer with headers set, or left out where the value is None; `_` stands for `-`."""
        changes = {name.replace("_", "-"): value for name, value in changes.items()}
        headers = {name: value for name, value in {**self.headers, **changes}.items() if value is not None}
        return replace(self, headers=headers)

    def with_body(self, body: bytes) -> Answer:
        """Return this answer with another body, and the length that belongs to it."""
        return replace(self.with_headers(content_length=str(len(body))), body=body)


Spoil = Callable[[Asked, Answer], Answer]


@dataclass(frozen=True)
class Lie:
    """What a Hub does wrong: how it spoils its answers, by endpoint; `times` says how often each (None: always).

    `by` is what a client asks for that meets it: a commit, a version, a branch, or a commit of a trusted publisher.
    """

    name: str
    group: str
    spoils: Mapping[str, Spoil]
    by: str = "commit"
    times: int | None = None
    counts: Counter = field(default_factory=Counter, compare=False)

    def answer(self, asked: Asked, honest: Answer) -> Answer:
        spoil = self.spoils.get(asked.endpoint)
        if spoil is None or (self.times is not None and self.counts[asked.endpoint] >= self.times):
            return honest
        self.counts[asked.endpoint] += 1
        return spoil(asked, honest)


class LyingHub(socketserver.ThreadingTCPServer):
    """Serve while the block runs: `with LyingHub(hub.endpoint, lie) as liar: liar.endpoint`; a lie of None is honest.

    `asked` lists the requests so far, as "GET /api/...".
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, honest: str, lie: Lie | None = None):
        self.honest, self.lie, self.asked = urlsplit(honest), lie, []
        super().__init__(("127.0.0.1", 0), Relay)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> LyingHub:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: socket.socket, client_address: object) -> None:
        """Say nothing: clients that hang up in mid-answer are what the tests are about."""


class Relay(BaseHTTPRequestHandler):
    server: LyingHub
    protocol_version = "HTTP/1.1"
    # Otherwise the body would wait for the head's acknowledgement.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        asked, lie = asked_for(self.command, self.server.endpoint, self.path), self.server.lie
        self.server.asked.append(f"{self.command} {self.path}")
        answer = self.honest_answer()
        self.send(lie.answer(asked, answer) if lie else answer)

    do_HEAD = do_GET  # noqa: N815

    def honest_answer(self) -> Answer:
        connection = http.client.HTTPConnection(self.server.honest.hostname, self.server.honest.port, timeout=FOREVER)
        kept = {name: self.headers[name] for name in ("Accept", "Range", "User-Agent") if name in self.headers}
        connection.request(self.command, self.path, headers=kept)
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        body = response.read()
        connection.close()
        return Answer(response.status, headers, body)

    def send(self, answer: Answer) -> None:
        if answer.wait:
            self.connection.settimeout(answer.wait)
            self.rfile.read(1)  # returns when the client hangs up
        self.close_connection = True
        if answer.raw is not None:
            self.wfile.write(answer.raw)
            return
        self.send_response_only(answer.status)
        for name, value in {"content-length": str(len(answer.body)), **answer.headers, "connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


def asked_for(method: str, endpoint: str, target: str) -> Asked:
    path = target.partition("?")[0]
    for name, pattern in ENDPOINTS.items():
        if match := pattern.match(f"{method} {path}"):
            parts = {key: unquote(value or "") for key, value in match.groupdict().items()}
            return Asked(name, parts.get("path", ""), parts.get("revision", ""), endpoint + target)
    return Asked("", "", "", endpoint + target)
