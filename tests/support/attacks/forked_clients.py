"""Clients of a Hub that start at once: forks of one process that has imported torch and the clients.

huggingface_hub 2.4.0 reads its environment into the module `constants` when it is imported, and looks there whenever it
needs something. So a fork sets its environment, reads it anew, and is as fresh as a new process. What kernels 0.17.2
reads, KERNELS_CACHE, is no variable of a `client_environment`.

This file is also the program that forks: python -m tests.support.attacks.forked_clients SOCKET MODULE...
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tools.hub.client_environment import client_environment

ROOT = Path(__file__).resolve().parents[3]
READY = "ready\n"
PRELOADED = (
    *("torch", "kernels", "huggingface_hub.hf_api", "huggingface_hub.file_download", "rich.progress", "tqdm.auto"),
    *("tools.pins.verify", "tools.pins.hf_home", "tools.pins.pins_file"),
)


class Clients:
    """The process that forks, while the block runs. Calls from several threads run at the same time.

    It imports modules that its clients would import, `more` than the usual ones.
    """

    def __init__(self, *more: str):
        self._modules = PRELOADED + more

    def __enter__(self) -> Clients:
        self._folder = tempfile.TemporaryDirectory(prefix="clients-")
        self._path = Path(self._folder.name, "socket")
        command = [sys.executable, "-m", "tests.support.attacks.forked_clients", str(self._path), *self._modules]
        nowhere = client_environment("http://127.0.0.1:9", Path(self._folder.name))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, cwd=ROOT, env=nowhere, text=True, **pipes)
        assert self._process.stdout.readline() == READY, f"{command} does not serve"
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def start(self, variables: dict[str, str], function: str, *arguments: Any) -> Call:
        """Call `module:function` with arguments that JSON can hold, in a fork with this environment and no other."""
        return Call(self._path, {"environment": variables, "function": function, "arguments": arguments})

    def call(self, variables: dict[str, str], function: str, *arguments: Any, limit: float = 120.0) -> dict[str, Any]:
        """Return what the function returned, a dictionary, as `Call.result` does."""
        return self.start(variables, function, *arguments).result(limit)

    def run_tool(self, tool: str, *arguments: object, variables: dict[str, str]) -> subprocess.CompletedProcess:
        """Run a program by the name of its module, and return how it ended, as `hub_clients.run_tool` does."""
        done = self.call(variables, f"{__name__}:ended", tool, list(map(str, arguments)), limit=300.0)
        assert "returncode" in done, done
        return subprocess.CompletedProcess([tool, *arguments], **done)


class Call:
    """One fork, with its process id in `pid`."""

    def __init__(self, path: Path, request: dict[str, Any]):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._stream = self._socket.makefile("rw")
        print(json.dumps(request), file=self._stream, flush=True)
        self.pid = int(self._stream.readline())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def result(self, limit: float) -> dict[str, Any]:
        """Return what the function returned; {"end": "died"} if the process did, "hung" if it took `limit` seconds."""
        self._socket.settimeout(limit)
        try:
            line = self._stream.readline()
        except TimeoutError:
            self.kill()
            return {"end": "hung", "error": f"no end after {limit} seconds"}
        finally:
            self._socket.close()
        return json.loads(line) if line else {"end": "died", "error": "the process died"}


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 64
    request_queue_size = 64


class Fork(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        self.wfile.write(f"{os.getpid()}\n".encode())
        os.environ.clear()
        os.environ.update(request["environment"])
        # Root may write bytecode into a read-only cache, and loads at once share it; bytecode has cases of its own.
        sys.dont_write_bytecode = True
        importlib.reload(importlib.import_module("huggingface_hub.constants"))
        module, name = request["function"].split(":")
        done = getattr(importlib.import_module(module), name)(*request["arguments"])
        self.wfile.write(f"{json.dumps(done)}\n".encode())


def ended(tool: str, arguments: list[str]) -> dict[str, Any]:
    """Run a program as `python -m` does, in this process, and return its exit status and what it wrote."""
    said = [tempfile.TemporaryFile("w+") for _ in range(2)]
    for descriptor, file in enumerate(said, start=1):  # not only sys.stdout and sys.stderr: loggers keep streams
        os.dup2(file.fileno(), descriptor)
    sys.argv = [tool, *arguments]
    status = 0
    try:
        runpy.run_module(tool, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream, file in zip((sys.stdout, sys.stderr), said):
        stream.flush()
        file.seek(0)
    stdout, stderr = (file.read() for file in said)
    return {"returncode": status, "stdout": stdout, "stderr": stderr}


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    server = Server(sys.argv[1], Fork)
    print(READY, end="", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    server.serve_forever()
