"""A Hub of kernels on this machine: the real clients publish to it and load from it, without an account.

    python -m tools.hub.server --folder hub --trusted org
    HF_ENDPOINT=http://127.0.0.1:<port> python -c 'import kernels; kernels.get_kernel("org/optimizer", version=0)'

The clients read HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE when they are imported, so set them before. Two things look
like faults of the server but are not (kernels 0.17.2, huggingface_hub 2.4.0):

- Some variables break or divert the clients: HF_HUB_DISABLE_TELEMETRY, DISABLE_TELEMETRY, DO_NOT_TRACK, LOCAL_KERNELS
  and proxies. client_environment.py says how. Do not set them.
- Offline, `kernels` finds only what `snapshot_download(repo_id, repo_type="kernel", revision=...)` has fetched as a
  whole. What `get_kernel` or `kernels download` left in the cache is refused as incomplete.

There is no access control, so the server listens to this machine only and refuses requests that a web page could send.
"""

from __future__ import annotations

import argparse
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tools.hub.api import ROUTES
from tools.hub.store import HubError, Store

HOST = "127.0.0.1"


class Hub:
    """Serve a folder while the block runs: `with Hub(folder, trusted=["org"]) as hub: hub.endpoint`.

    Organizations in `trusted` are trusted kernel publishers: `get_kernel` loads their kernels without
    trust_remote_code, and only theirs can be locked with `kernels lock`.
    """

    def __init__(self, folder: Path | str, trusted: Iterable[str] = (), *, port: int = 0):
        self._socket = socket.create_server((HOST, port))
        # Otherwise the body, a separate packet, would wait for the head's acknowledgement. Connections inherit this.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self.endpoint = f"http://{HOST}:{self._socket.getsockname()[1]}"
        # Without an access log: headers may carry tokens, and clients report their errors themselves.
        config = uvicorn.Config(application(Path(folder), frozenset(trusted)), log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.serve, daemon=True)

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def serve(self) -> None:
        self._server.run([self._socket])


def application(folder: Path, trusted: frozenset[str]) -> Starlette:
    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]), Middleware(OwnClients)],
        exception_handlers={HubError: refuse},
    )
    app.state.store, app.state.trusted = Store(folder), trusted
    return app


class OwnClients:
    """Refuse browsers, since a foreign page may send requests to this machine, and give routes the undecoded path.

    A revision may contain a slash, which the clients encode. Decoded too early, it would divide the path.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        browser = "origin" in Headers(scope=scope)
        app = JSONResponse({"error": "no web page is served"}, 403) if browser else self._app
        await app({**scope, "path": scope["raw_path"].decode()}, receive, send)


def refuse(request: Request, error: HubError) -> Response:
    headers = {"X-Error-Code": error.code} if error.code else {}
    return JSONResponse({"error": str(error)}, error.status, headers)


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
        hub.serve()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
