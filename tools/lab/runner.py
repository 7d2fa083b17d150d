"""Runs a stage in a subprocess and lives through what may happen to it: it hangs, it dies, its time is over."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tools.lab.records import Record, Records

ROOT = Path(__file__).resolve().parent.parent.parent

# To import torch, load the kernel and list the items; the key of its record, where that fails.
START_SECONDS = 120.0
START = "start"


@dataclass
class Stage:
    """A stage to run: the module with its `items`, what a worker is told, and when it has to be over."""

    name: str
    module: str
    order: dict
    until: float  # on the monotonic clock
    log: Path
    say: Callable[[str], None] = field(default=print)


class Worker:
    """A subprocess that runs a stage's items, with all that it starts, and the events that it tells."""

    def __init__(self, stage: Stage, order: dict):
        environment = dict(os.environ)
        if order["tiny"]:
            environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.log = stage.log.open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.lab.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.process.stdin.write(json.dumps(order))
        self.process.stdin.close()
        self.events: queue.Queue[dict | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            if line.endswith("\n"):  # else it was cut off with the process
                self.events.put(json.loads(line))
        self.events.put(None)

    def next(self, until: float) -> dict | None:
        """Return the next event, None after the last; `queue.Empty` if there is none until then."""
        return self.events.get(timeout=max(until - time.monotonic(), 0.0))

    def end(self) -> int:
        """Kill the process and everything that it has started; return its status."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.log.close()
        return self.process.wait()


class Watch:
    """What is known of a worker's run: the item that it is at, since when, and what has ended."""

    def __init__(self, stage: Stage, records: Records):
        self.stage, self.records = stage, records
        self.waiting: list[str] = []
        self.ended: list[str] = []
        self.at("", START_SECONDS)

    def at(self, key: str, limit: float) -> None:
        self.key, self.limit, self.began = key, limit, time.monotonic()

    @property
    def deadline(self) -> float:
        """When the item hangs, or the stage is over."""
        return min(self.began + self.limit, self.stage.until)

    def take(self, event: dict) -> None:
        """Go on by what the worker tells."""
        if "items" in event:
            self.waiting = event["items"]
            self.records.drop(self.stage.name, START)
            self.at("", START_SECONDS)
        elif "begin" in event:
            self.at(event["begin"], event["limit"])
        elif "ended" in event:
            self.keep(Record(self.stage.name, event.pop("ended"), **event))

    def fail(self, problem: str) -> None:
        """Record that the worker did not come to the end of its item, or of its start."""
        seconds = time.monotonic() - self.began
        self.keep(Record(self.stage.name, self.key or START, "failed", seconds, problem))

    def keep(self, record: Record) -> None:
        self.records.add(record)
        self.ended.append(record.key)
        self.at("", START_SECONDS)
        problem = f": {record.problem}" if record.problem else ""
        left = f"{len(self.waiting) - len(self.ended)} to go, {clock(self.stage.until - time.monotonic())} left"
        self.stage.say(f"[{record.stage}] {record.key}: {record.status} ({record.seconds:.1f} s; {left}){problem}")


def run_stage(stage: Stage, records: Records) -> bool:
    """Run the items of a stage that are not done, a record each; return whether all of them were reached.

    An item that hangs or ends its process is recorded as failed, and the rest goes on in a new process.
    """
    tried: set[str] = set()
    while time.monotonic() < stage.until:
        failed = [key for key, record in records.of(stage.name).items() if record.status == "failed"]
        skip = sorted(tried.union(records.done(stage.name)))
        more = {"module": stage.module, "skip": skip, "failed": failed, "until": stage.until}
        worker = Worker(stage, {**stage.order, **more})
        watch = Watch(stage, records)
        try:
            complete = follow(worker, watch)
        finally:
            worker.end()
        tried.update(watch.ended)
        if complete or START in watch.ended:
            return complete
    stage.say(f"[{stage.name}] its time is over")
    return False


def follow(worker: Worker, watch: Watch) -> bool:
    """Record what a worker tells until it ends, hangs or is out of time; return whether it came to its last item."""
    while True:
        try:
            event = worker.next(watch.deadline)
        except queue.Empty:
            if time.monotonic() < watch.stage.until:
                watch.fail(f"hung: it did not end in {watch.limit:.0f} s")
            return False
        if event is None:
            status = worker.end()
            if watch.key or not watch.ended:  # else it ended by itself, having lost the GPU
                watch.fail(f"its process ended with status {status}")
            return False
        if "finished" in event:
            return True
        watch.take(event)


def clock(seconds: float) -> str:
    """Return minutes and seconds as they are read."""
    return f"{int(max(seconds, 0)) // 60}:{int(max(seconds, 0)) % 60:02}"
