"""A process that takes steps of one case with one build when asked, so that several builds can take turns.

Builds are in separate processes: two of one commit register the same ops, and each needs its own garbage collector and
allocator. Seconds are processor time of this process, on one thread. On an idle machine that is what a clock shows; on
a busy one the work of other processes does not count.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.library import Library
from torch.optim import Optimizer

from benchmarks.built_kernel import load_variant, read_metadata
from benchmarks.host_cases import Case, build_optimizer, imagined_ranks


class Worker:
    """The process, which ends with the `with` block. Its errors are raised here as RuntimeError with a traceback."""

    def __init__(self, folder: Path, case: Case):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(folder, case, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join()

    def steps(self, count: int) -> float:
        """Return the mean seconds of `count` steps."""
        with contextlib.suppress(ConnectionError):  # a process that has failed said why before it ended
            self._connection.send(count)
        try:
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError("a process that takes steps has died") from None
        if not succeeded:
            raise RuntimeError(value)
        return value


def empty_ops(namespace: str) -> Library:
    """Make the compiled ops of a namespace that return nothing do nothing, for as long as the result is held.

    Torch still dispatches each call, to a function in Python. That takes 4 µs a call, about what a launch on a GPU
    takes the host, and 0.15 µs for each matrix of a list.
    """
    library = Library(namespace, "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space == namespace and not schema.returns:
            library.impl(name, lambda *arguments, **options: None, "CPU", allow_override=True)
    return library


def _serve(folder: Path, case: Case, connection: Connection) -> None:
    torch.set_num_threads(1)
    try:
        with imagined_ranks(case.ranks):
            optimizer = build_optimizer(load_variant(folder), case)
            emptied = empty_ops(read_metadata(folder)["id"])
            _answer_steps(optimizer, connection)
            del emptied
    except Exception:
        connection.send((False, traceback.format_exc()))


def _answer_steps(optimizer: Optimizer, connection: Connection) -> None:
    """Take as many steps as requested and answer with their mean seconds, until the other end closes the connection."""
    while True:
        try:
            count = connection.recv()
        except EOFError:
            return
        start = time.process_time()
        for _ in range(count):
            optimizer.step()
        connection.send((True, (time.process_time() - start) / count))
