"""Processes that run jobs together, over gloo or NCCL, started once for each world size and used by every test.

A job is a function at the top of a module, `job(kernel, *arguments)`, where `kernel` is the package under test. All
ranks run it at once, and what each of them returns is the result. Everything goes by pickle, tensors from the CPU. Over
NCCL each rank has a GPU of its own, where its CUDA tensors are.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from tests.support.watched_messages import Watch, check_together

REPO_ID = "org/optimizer"
# Importing them costs seconds, and is done once: the others are forked from a process that has. None of them asks for a
# GPU, which a forked process could not use then.
PRELOADED = [
    *("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining", "kernels"),
    "tests.support.preloaded_kernel",
]
# After one rank has failed the others, which wait for it, are given so long to fail as well.
GRACE_SECONDS = 2.0
# Where the tensors of ranks are that talk over a backend.
DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class JobError(RuntimeError):
    """A rank raised, died, or did not answer in time; the message says which, and what it raised."""


class Member(NamedTuple):
    """What a process is told at its start."""

    rank: int
    size: int
    store: str  # file in which the ranks find each other
    variants: str  # folder of the build of the package
    cache_home: str  # where it reads and writes what was measured
    backend: str  # of the group
    collective_seconds: float


class RankPool:
    """`size` processes of one group. They start with the first job, and anew after one that failed."""

    def __init__(self, kernel: ModuleType, backend: str, size: int, collective_seconds: float, cache_home: str):
        self._variants = str(Path(kernel.__file__).parents[1])
        self._backend = backend
        self._collective_seconds = collective_seconds
        self._cache_home = cache_home
        self.size = size
        self._processes: list[multiprocessing.Process] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(
        self,
        job: Callable[..., Any],
        *arguments: Any,
        seconds: float = 120.0,
        may_die: Collection[int] = (),
        agreeing: bool = True,
    ) -> list[Any]:
        """Return what `job` returned on each rank, None for those of `may_die`, who die of it.

        Raises JobError, which ends all processes, if a rank raises, dies, or takes longer than `seconds`. Messages of
        ranks that are `agreeing` are checked together (`watched_messages`); AssertionError if NCCL would not send them.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((job, arguments))
        for connection in self._connections:
            connection.send_bytes(message)
        try:
            results = self._collect(monotonic() + seconds, may_die)
        except BaseException:
            self.close()
            raise
        if any(rank in may_die and result is None for rank, result in enumerate(results)):
            self.close()
        elif agreeing:
            check_together([messages for _, messages in results])
        return [result and result[0] for result in results]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections):
            process.join()
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        # The process that ranks are forked from starts with the first of them, and keeps the variables of that time.
        with mock.patch.dict(os.environ, {"LOCAL_KERNELS": f"{REPO_ID}={self._variants}"}):
            for rank in range(self.size):
                self._start_rank(context, rank, store)

    def _start_rank(self, context: multiprocessing.context.BaseContext, rank: int, store: str) -> None:
        folders = store, self._variants, self._cache_home
        member = Member(rank, self.size, *folders, self._backend, self._collective_seconds)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(member, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)

    def _collect(self, deadline: float, may_die: Collection[int]) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < self.size:
            pending = {self._connections[r]: r for r in range(self.size) if r not in results and r not in failures}
            ready = wait(list(pending), max(deadline - monotonic(), 0.0))
            if not ready:
                failures.update((rank, "no answer in time") for rank in pending.values())
            for connection in ready:
                rank = pending[connection]
                succeeded, value = _received(connection)
                if succeeded or (value is None and rank in may_die):
                    results[rank] = value
                else:
                    failures[rank] = value or "died"
                    deadline = min(deadline, monotonic() + GRACE_SECONDS)
        if failures:
            ranks_by_text = {text: [r for r in sorted(failures) if failures[r] == text] for text in failures.values()}
            lines = (f"ranks {ranks} of {self.size}: {text}" for text, ranks in ranks_by_text.items())
            raise JobError("\n".join(lines))
        return [results[rank] for rank in range(self.size)]


class Pools:
    """Pools of each world size, `pools(4)`, over one backend; `device` is where their ranks have tensors."""

    def __init__(self, kernel: ModuleType, backend: str):
        self.device = DEVICES[backend]
        self._kernel, self._backend = kernel, backend
        self._cache_home = os.environ.get("XDG_CACHE_HOME", "")  # of the session, not of a test
        self._pools: dict[tuple[int, float], RankPool] = {}

    def __call__(self, size: int, collective_seconds: float = 60.0) -> RankPool:
        """Return the pool of `size` processes, whose collectives fail after `collective_seconds`."""
        key = size, collective_seconds
        if key not in self._pools:
            self._pools[key] = RankPool(self._kernel, self._backend, *key, self._cache_home)
        return self._pools[key]

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()


def local_kernels() -> dict[str, str]:
    """Return the repositories that LOCAL_KERNELS, `<repository>=<folder>:...`, names, and their folders."""
    entries = os.environ.get("LOCAL_KERNELS", "").split(":")
    return {repository: folder for repository, sign, folder in (entry.partition("=") for entry in entries) if sign}


def load_kernel(variants: Path) -> ModuleType:
    """Return the package as users do, LOCAL_KERNELS being set; from `variants` itself without the Hub's package.

    If there is only one variant, it is loaded by its backend's name: a CUDA torch loads a CPU variant no other way.
    """
    try:
        import kernels
    except ModuleNotFoundError:
        from benchmarks.built_kernel import find_variant, load_variant

        return load_variant(find_variant(variants))
    files = list(variants.glob("*/metadata.json"))
    backend = json.loads(files[0].read_text())["backend"]["type"] if len(files) == 1 else None
    return kernels.get_kernel(REPO_ID, version=0, backend=backend, trust_remote_code=True)


def device_of_ranks() -> str:
    """Return where a job's tensors are; a rank's GPU is its current one."""
    import torch.distributed as dist

    return DEVICES[dist.get_backend()]


def one_by_one(kernel: ModuleType):
    """Return a patch by which GPUs multiply one matrix at a time, as CPUs do.

    cuBLAS may sum in another order where a batch has another length, which depends on who owns what: bits are those of
    one process only with the same products of the same shapes.
    """
    single, select = kernel.kernels.products.SINGLE, kernel.iteration.select_products

    def select_single(device, *size):
        return single if device.type == "cuda" else select(device, *size)

    return mock.patch.object(kernel.iteration, "select_products", select_single)


def _received(connection: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return False, None


def _serve(member: Member, connection: Connection) -> None:
    # Before anything asks for a device or an interface: gloo would look for the address of the host's name.
    os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={member.variants}"
    os.environ["XDG_CACHE_HOME"] = member.cache_home
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store, device = dist.FileStore(member.store, member.size), None
    if DEVICES[member.backend] == "cuda":
        device = torch.device("cuda", member.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(member.backend, store=store, rank=member.rank, world_size=member.size, device_id=device)
    kernel = load_kernel(Path(member.variants))
    one_by_one(kernel).start()
    watch = Watch(kernel)
    watch.start()
    dist.barrier()  # to start may take longer than a collective is given
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=member.collective_seconds), dist.group.WORLD)
    gc.freeze()  # optimizers ask for collections, which then need not look at torch's modules
    while True:
        try:
            job, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:  # the tests are over
            return
        try:
            answer = True, (job(kernel, *arguments), watch.take())
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
