"""A process that takes steps of one case with one build when it is told to, so that several builds can take turns.

Builds are kept apart: two of one commit register the same ops, and each has a garbage collector and an allocator of its
own. Seconds are those of the processor in this process, on one thread: on an idle machine they are what a clock shows,
and on a busy one they do not count what others run.
"""

from __future__ import annotations

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
    """The process; it ends with the `with` block. What it raises is raised here, as RuntimeError with its traceback."""

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
        """Return the mean seconds of so many steps."""
        try:
            self._connection.send(count)
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError("a process that takes steps has died") from None
        if not succeeded:
            raise RuntimeError(value)
        return value


def empty_ops(namespace: str) -> Library:
    """Let the compiled ops of a namespace, but those that return something, do nothing while the result is held.

    Torch still dispatches each of them, to a function in Python: 4 µs a call, about what a launch on a GPU takes the
    host, and 0.15 µs for each matrix of a list.
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
    """Take as many steps as are asked for and answer with their mean seconds, until the other end is closed."""
    while True:
        try:
            count = connection.recv()
        except EOFError:
            return
        start = time.process_time()
        for _ in range(count):
            optimizer.step()
        connection.send((True, (time.process_time() - start) / count))
