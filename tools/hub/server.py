"""A Hub of kernels on this machine: the real clients publish to it and load from it, without an account.

    python -m tools.hub.server --folder hub --trusted org
    HF_ENDPOINT=http://127.0.0.1:<port> python -c 'import kernels; kernels.get_kernel("org/optimizer", version=1)'

The clients read HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE when they are imported, so set them before. Two things look
like a fault of the server and are not (kernels 0.17.2, huggingface_hub 2.4.0):

- Variables break or divert the clients: HF_HUB_DISABLE_TELEMETRY, DISABLE_TELEMETRY, DO_NOT_TRACK, LOCAL_KERNELS and
  proxies; client_environment.py says how. Leave them unset.
- Offline, `kernels` finds only what `snapshot_download(repo_id, repo_type="kernel", revision=...)` has fetched as a
  whole; what `get_kernel` or `kernels download` left in the cache is refused as incomplete.

There is no access control, hence the server listens to this machine alone and refuses what a web page could send.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import sys
import threading
import traceback
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools.hub.api import ROUTES
from tools.hub.routes import Answer, Request, Site
from tools.hub.store import HubError, Store

HOST = "127.0.0.1"


class Hub:
    """Serve a folder while the block runs: `with Hub(folder, trusted=["org"]) as hub: hub.endpoint`.

    Organizations in `trusted` are trusted kernel publishers: `get_kernel` loads their kernels without
    trust_remote_code, and only theirs can be locked with `kernels lock`.
    """

    def __init__(self, folder: Path | str, trusted: Iterable[str] = (), *, port: int = 0):
        self._server = Server((HOST, port), Handler)
        self._server.site = Site(Store(Path(folder)), frozenset(trusted))
        self.endpoint = f"http://{HOST}:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve_forever(self) -> None:
        self._server.serve_forever()


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # one snapshot_download opens eight connections at once
    site: Site

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no event; anything else is a fault of ours."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # version 0.9, the base class's, has answers without a status
    server_version = "kernel-hub"
    timeout = 30  # seconds for a client that has begun to speak
    disable_nagle_algorithm = True  # the body is a packet of its own, and would wait for the head's acknowledgement
    server: Server

    def respond(self) -> None:
        last, self.close_connection = self.close_connection, True  # an unread body would pass for the next request
        try:
            self.check_sender()
            route, path, query = ROUTES.find(self.command, self.path)
            body = self.read_body(route.body_limit)
            self.close_connection = last
            url = f"http://{self.headers['Host']}"
            answer = route.function(Request(self.server.site, url, path, query, self.headers.get("Range"), body))
        except HubError as error:
            headers = {"X-Error-Code": error.code} if error.code else {}
            answer = Answer({"error": str(error)}, error.status, headers)
        except (ConnectionError, TimeoutError):
            raise  # nobody is left to answer
        except Exception:
            traceback.print_exc()
            answer = Answer({"error": "the server failed; its console says why"}, 500)
        self.send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = respond  # noqa: N815

    def check_sender(self) -> None:
        """Refuse browsers: a page from elsewhere may send requests to this machine, under a name of its own."""
        name = self.headers.get("Host", "").partition(":")[0]
        if "Origin" in self.headers or not (name == "localhost" or is_loopback(name)):
            raise HubError(403, "only clients on this machine, by its loopback address, are served")

    def read_body(self, limit: int) -> bytes:
        if self.command in ("GET", "HEAD") and "Content-Length" not in self.headers:
            return b""
        text = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not text:
            raise HubError(411, "need a Content-Length")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise HubError(400, f"not a Content-Length: {text!r}")
        if int(text) > limit:
            raise HubError(413, f"a body of {text} bytes; at most {limit} are taken here")
        body = self.rfile.read(int(text))
        if len(body) < int(text):
            raise HubError(400, f"the body ends after {len(body)} of {text} bytes")
        return body

    def send(self, answer: Answer) -> None:
        raw = isinstance(answer.content, bytes)
        body = answer.content if raw else json.dumps(answer.content).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/octet-stream" if raw else "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer, in place of the base class, a request that is not HTTP or whose method has no do_ function."""
        self.close_connection = True
        self.send(Answer({"error": message or "not a request"}, 405 if code == 501 else code))

    def log_message(self, *arguments: object) -> None:
        """Keep quiet: headers may carry tokens, and clients report their errors themselves."""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where repositories are kept")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--trusted", action="append", default=[], help="an organization to trust; may be repeated")
    arguments = parser.parse_args()
    try:
        hub = Hub(arguments.folder, arguments.trusted, port=arguments.port)
    except (OSError, OverflowError) as error:
        parser.error(str(error))
    print(f"export HF_ENDPOINT={hub.endpoint}", flush=True)
    try:
        hub.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
