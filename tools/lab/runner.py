"""Runs a stage in a process, and in a new one if that hangs, dies or loses the GPU, until its time is used up."""

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

from tools.lab.records import INTERRUPTED, UNFINISHED, Record, Records, append

ROOT = Path(__file__).resolve().parents[2]

# The key of a record that says why a stage could not begin.
START = "start"
# Seconds to wait for a killed process, which may be stuck in the driver.
END_SECONDS = 10.0


@dataclass(frozen=True)
class Stage:
    """A stage to run: the module with its `items`, the worker's order, and the time at which it must end."""

    name: str
    module: str
    order: dict
    until: float  # on the monotonic clock
    log: Path


def run_stage(stage: Stage, records: Records) -> bool:
    """Run the items of a stage that are not done, and record each. Return whether none of them is left."""
    since = time.time()
    while time.monotonic() < stage.until:
        done, ended = records.done(stage.name, since), records.ended(stage.name, since)
        failed = [key for key, record in records.of(stage.name).items() if record.status == "failed"]
        more = {"stage": stage.name, "module": stage.module, "skip": done, "failed": failed, "until": stage.until}
        more["ended"] = ended
        place = stage.log.stat().st_size if stage.log.exists() else 0
        try:
            status = run(stage, [sys.executable, "-m", "tools.lab.worker"], json.dumps({**stage.order, **more}))
        except BaseException:  # the lab itself is being ended, by Ctrl-C or SIGTERM
            cut_running(records, stage.name, since)
            raise
        started = status == 0 or records.ended(stage.name, since) != ended
        if started and START in records.of(stage.name):
            append(records.file, Record(stage.name, START, "ok", 0.0))
        if status == 0:
            return not records.left(stage.name)
        if status is None:
            cut_running(records, stage.name, since)
            break
        end = f"its process ended with {described(status)}: {last_line(stage.log, place)}"
        if not started:
            append(records.file, Record(stage.name, START, "failed", 0.0, end))
            print(f"[{stage.name}] {end}")
            return False
        explain_end(records, stage.name, since, end)
    print(f"[{stage.name}] its time is over")
    return came_to_its_end(records, stage.name)


def came_to_its_end(records: Records, stage: str) -> bool:
    """Whether no item of a stage is left. Without a record of an item its process had not listed them yet."""
    return bool(records.of(stage).keys() - {START}) and not records.left(stage)


def explain_end(records: Records, stage: str, since: float, end: str) -> None:
    """Add to the record of an unfinished item how its process ended."""
    for record in running(records, stage, since):
        append(records.file, replace(record, problem=f"{record.problem}; {end}"))
        print(f"[{stage}] {record.key}: {record.problem}; {end}")


def cut_running(records: Records, stage: str, since: float) -> None:
    """Record an unfinished item as cut, because the end of the stage's time, or of the lab, says nothing about it."""
    for record in running(records, stage, since):
        append(records.file, replace(record, status="cut", problem=INTERRUPTED))


def running(records: Records, stage: str, since: float) -> list[Record]:
    """Return the records of items that began after `since` and have not ended."""
    unfinished = re.compile(UNFINISHED.format(r"\S+"))
    stage_records = records.of(stage).values()
    return [record for record in stage_records if record.at >= since and unfinished.fullmatch(record.problem)]


def run(stage: Stage, command: Sequence[str], told: str = "", **more: str) -> int | None:
    """Run a program and everything it starts until it ends or the stage's time is over; return its status, or None.

    It uses the lab's own caches, so the user's measurements do not count.
    """
    caches = stage.log.parent.resolve() / "caches"
    environment = {**os.environ, "XDG_CACHE_HOME": str(caches), **more}
    if stage.order["tiny"]:
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"TRITON_INTERPRET": "1"} if told else {}
    log = stage.log.open("a")
    # Not used as a context manager, whose end would wait forever.
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
    """Return an exit status in readable form, with the signal's name if a signal ended the process."""
    try:
        return f"status {status}" if status >= 0 else f"status {status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"status {status}"


def kill(process: subprocess.Popen) -> None:
    """Kill everything that a process has started, and the process itself if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


def last_line(log: Path, place: int = 0) -> str:
    """Return the last line of the part of a log that begins at byte `place`."""
    printed = log.read_bytes()[place:].decode(errors="replace")
    return (printed.strip().splitlines() or ["it said nothing"])[-1][:300]
