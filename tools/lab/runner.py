"""Runs a stage in a process of its own, and in a new one where that has hung, died or lost the GPU, until its time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.lab.records import UNFINISHED, Record, Records, append

ROOT = Path(__file__).resolve().parents[2]

# For a process that is killed: it may be stuck in the driver.
END_SECONDS = 10.0


@dataclass(frozen=True)
class Stage:
    """A stage to run: the module with its `items`, what a worker is told, and when it has to be over."""

    name: str
    module: str
    order: dict
    until: float  # on the monotonic clock
    log: Path


def run_stage(stage: Stage, records: Records) -> bool:
    """Run the items of a stage that are not done, a record each; return whether all of them were reached."""
    since = time.time()
    while time.monotonic() < stage.until:
        done = records.done(stage.name, since)
        failed = [key for key in records.of(stage.name) if key not in done]
        more = {"stage": stage.name, "module": stage.module, "skip": done, "failed": failed, "until": stage.until}
        place = stage.log.stat().st_size if stage.log.exists() else 0
        status = run(stage, [sys.executable, "-m", "tools.lab.worker"], json.dumps({**stage.order, **more}))
        if status == 0:
            return True
        if status is None:
            break
        end = f"its process ended with {described(status)}: {last_line(stage.log, place)}"
        if records.done(stage.name, since) == done:
            append(records.file, Record(stage.name, "start", "failed", 0.0, end))
            print(f"[{stage.name}] {end}")
            return False
        explain_end(records, stage.name, since, end)
    print(f"[{stage.name}] its time is over")
    return False


def explain_end(records: Records, stage: str, since: float, end: str) -> None:
    """Add to the record of an item that has not ended how its process did."""
    for record in records.of(stage).values():
        if record.at >= since and re.fullmatch(UNFINISHED.format(".*"), record.problem):
            append(records.file, replace(record, problem=f"{record.problem}; {end}"))
            print(f"[{stage}] {record.key}: {record.problem}; {end}")


def run(stage: Stage, command: Sequence[str], told: str = "", **more: str) -> int | None:
    """Run a program, with all that it starts, until it ends or the stage is over: return its status, or None.

    Its caches are the lab's: what the user's hold of this machine does not count, only what the lab has written.
    """
    caches = stage.log.parent.resolve() / "caches"
    environment = {**os.environ, "XDG_CACHE_HOME": str(caches), **more}
    if stage.order["tiny"]:
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"TRITON_INTERPRET": "1"} if told else {}
    log = stage.log.open("a")
    # No context of Popen's, which would wait for ever at its end.
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
    )
    try:
        process.communicate(told, timeout=max(stage.until - time.monotonic(), 0.0))
        return process.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        ended = process.poll() is not None
        kill(process)
        for mark in () if ended else caches.rglob("*.trial"):  # the candidate that was being tried is not why
            mark.unlink()
        log.close()


def described(status: int) -> str:
    """Return an exit status as a person reads it: with the signal's name where one ended the process."""
    try:
        return f"status {status}" if status >= 0 else f"status {status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"status {status}"


def kill(process: subprocess.Popen) -> None:
    """Kill what a process has started, and itself where it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


def last_line(log: Path, place: int = 0) -> str:
    """Return the last line of what stands in a log behind the byte `place`."""
    said = log.read_bytes()[place:].decode(errors="replace")
    return (said.strip().splitlines() or ["it said nothing"])[-1][:300]
