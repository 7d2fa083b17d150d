"""Stage 2: the tests that need a GPU, run by pytest in a process that may hang, die or lose the GPU at one of them.

pytest-timeout ends a worker that hangs, pytest-xdist starts another one and continues, and pytest-reportlog writes each
verdict as it comes. This module is also a plugin of that run. It leaves out tests that passed in an earlier run, begins
with those that were never tried, and notes which tests are to run and which one is running. It ends a worker that has
lost its GPU, because all later tests would fail in it.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import torch
from xdist.remote import Producer
from xdist.scheduler import LoadScheduling
from xdist.workermanage import WorkerController

from tests.support.report_log import Verdict, read_log, uncollected
from tools.lab.items import loses_gpu
from tools.lab.records import INTERRUPTED, Record, Records, append, write_whole
from tools.lab.runner import Stage, last_line, run

# The most seconds of a test, and its largest share of the stage's time, so that one that hangs leaves time to others.
LIMIT_SECONDS, LIMIT_SHARE = 180, 1 / 3
RESTARTS = 100
GPU_LOST, NO_TESTS = 3, 5
STATUSES = {"passed": "ok", "failed": "failed", "skipped": "skipped"}

# The variable that names the folder of the files in which the lab and its plugin tell each other of tests.
FOLDER = "OPTIMIZER_LAB_FOLDER"
PASSED, TRIED, CHOSEN, RUNNING = "passed.txt", "tried.txt", "chosen.txt", "running.txt"
# The last log of pytest's whose verdicts are recorded. Until then its name has the digest of the records' identity.
RECORDED = "prove.jsonl"

# For a dry run: a few tests that need no GPU, run in the same way.
REHEARSED = ("tests/muon/test_device.py", "-m", "not gpu", "-k", "scaled")


def prove(stage: Stage, records: Records, tests: tuple[str, ...] = (), limit: int = LIMIT_SECONDS) -> bool:
    """Run the tests that need a GPU and have not passed, and record each. Return whether none of them is left."""
    began, folder = time.time(), stage.log.parent.resolve()
    log, recorded = folder / f"prove.{records.digest}.jsonl", folder / RECORDED
    listed, running = folder / CHOSEN, folder / RUNNING
    note_verdicts(records, log)  # of a run that was killed before it could
    for file in recorded, listed, running:
        file.unlink(missing_ok=True)
    (folder / PASSED).write_text("\n".join(records.done("prove", math.inf)))
    (folder / TRIED).write_text("\n".join(tried(records)))
    limit = min(limit, LIMIT_SHARE * (stage.until - time.monotonic()))
    chosen = tests or (REHEARSED if stage.order["tiny"] else ("-m", "gpu or multi_gpu"))
    command = [sys.executable, "-m", "pytest", "-p", "tools.lab.prove", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-n1", f"--max-worker-restart={RESTARTS}", f"--timeout={limit:.1f}", "--timeout-method=thread"]
    command += [f"--report-log={log}", *chosen]
    local = f"org/optimizer={stage.order['variants']}"
    try:
        status = run(stage, command, LOCAL_KERNELS=local, **{FOLDER: str(folder)})
    finally:  # also if the lab itself is being ended
        verdicts = note_verdicts(records, log)
    append(records.file, verdict_of_run(status, time.time() - began, stage.log, listed, uncollected(recorded)))
    if status is None:
        note_interrupted(records, running, verdicts)
        print(f"[prove] its time is over: {len(verdicts)} tests came to their end")
    note_unreached(records, listed)  # pytest may also stop by itself, after too many crashes
    return not records.left("prove")


def note_verdicts(records: Records, log: Path) -> dict[str, Verdict]:
    """Record the tests that came to their end, by a log of pytest's if there is one; it is renamed to RECORDED."""
    verdicts = read_log(log)
    for node, verdict in verdicts.items():
        append(records.file, Record("prove", node, STATUSES[verdict.outcome], verdict.seconds, verdict.message[:2000]))
    if log.exists():
        log.replace(log.with_name(RECORDED))
    return verdicts


def tried(records: Records) -> list[str]:
    """Return the tests that began and did not pass: those that time interrupted, then those that failed."""
    attempts = [record for record in records.of("prove").values() if record.status == "failed" or record.problem]
    attempts.sort(key=lambda record: (record.status == "failed", record.at))  # the one that has waited longest first
    return [record.key for record in attempts]


def verdict_of_run(status: int | None, seconds: float, log: Path, listed: Path, broken: Mapping[str, str]) -> Record:
    """Return the record of pytest itself, which ended with `status`, or was killed at the end of its time: None.

    It has failed, too, if files are `broken`, each for a reason: the others run, and tests of these have no records.
    """
    if status not in (None, 0, 1, NO_TESTS):  # it failed to start
        return Record("prove", "pytest", "failed", seconds, f"it ended with status {status}; {last_line(log)}")
    if status is None and not listed.exists():
        return Record("prove", "pytest", "cut", seconds, "its time ended before it had found the tests")
    if broken:
        message = "; ".join(f"{name}: {why}" for name, why in broken.items())
        return Record("prove", "pytest", "failed", seconds, message[:2000])
    return Record("prove", "pytest", "ok", seconds)


def note_interrupted(records: Records, running: Path, ended: Collection[str]) -> None:
    """Record the test that was running when time ended as cut, or as failed if that has happened to it before.

    A test that failed in an earlier run keeps that record.
    """
    node = running.read_text() if running.exists() else None
    if node is None or node in ended:
        return
    earlier = records.of("prove").get(node)
    if earlier is None or (earlier.status, earlier.problem) == ("cut", ""):
        append(records.file, Record("prove", node, "cut", 0.0, INTERRUPTED))
    elif earlier.status == "cut":
        append(records.file, Record("prove", node, "failed", 0.0, f"{INTERRUPTED}, as in an earlier run"))


def note_unreached(records: Records, listed: Path) -> None:
    """Record those of the listed tests as cut that have no record yet."""
    known = records.of("prove")
    for node in listed.read_text().splitlines() if listed.exists() else ():
        if node not in known:
            append(records.file, Record("prove", node, "cut", 0.0))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that have passed before, and put those that were tried before behind all others."""
    passed = set(noted(PASSED).read_text().splitlines())
    done = [item for item in items if item.nodeid in passed]
    if done:
        config.hook.pytest_deselected(items=done)
    places = {node: place for place, node in enumerate(noted(TRIED).read_text().splitlines(), 1)}
    items[:] = sorted(
        (item for item in items if item.nodeid not in passed), key=lambda item: places.get(item.nodeid, 0)
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """List the tests that are to run."""
    write_whole(noted(CHOSEN), "\n".join(item.nodeid for item in session.items))


class InOrder(LoadScheduling):
    """Gives tests to workers in their order. After a crash xdist puts those that the worker had waiting behind all."""

    def remove_node(self, node: WorkerController) -> str | None:
        crashed = super().remove_node(node)
        self.pending.sort()  # of places in the list of tests
        return crashed


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> InOrder:
    return InOrder(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Note which test runs, because it may not end."""
    write_whole(noted(RUNNING), item.nodeid)


def noted(name: str) -> Path:
    return Path(os.environ[FOLDER]) / name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Wait for the GPU after each test, so that a kernel's error is attributed to the test that launched it."""
    result = yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """End the process after an error that makes the GPU unusable: xdist then reports that it crashed at this test."""
    report = yield
    if call.excinfo is not None and loses_gpu(call.excinfo.value):
        with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"{time.strftime('%H:%M:%S')} {item.nodeid}: {report.longreprtext}", file=sys.stderr, flush=True)
        os._exit(GPU_LOST)
    return report
