"""Stage 2: the tests that need a GPU, run by pytest in a process that may hang, die or lose the GPU at one of them.

pytest-timeout ends a worker that hangs, pytest-xdist starts another one and continues, and pytest-reportlog writes each
verdict as it comes. This module is also a plugin of that run. It leaves out tests that passed in an earlier run, notes
which tests are to run, and ends a worker that has lost its GPU, because all later tests would fail in it.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.support.report_log import read_log, uncollected
from tools.lab.items import loses_gpu
from tools.lab.records import Record, Records, append
from tools.lab.runner import Stage, last_line, run

LIMIT_SECONDS = 180
RESTARTS = 100
GPU_LOST, NO_TESTS = 3, 5
STATUSES = {"passed": "ok", "failed": "failed", "skipped": "skipped"}
PASSED, CHOSEN = "OPTIMIZER_LAB_PASSED", "OPTIMIZER_LAB_CHOSEN"

# For a dry run: a few tests that need no GPU, run in the same way.
REHEARSED = ("tests/muon/test_device.py", "-m", "not gpu", "-k", "scaled")


def prove(stage: Stage, records: Records, tests: tuple[str, ...] = (), limit: int = LIMIT_SECONDS) -> bool:
    """Run the tests that need a GPU and have not passed, and record each. Return whether none of them is left."""
    began = time.time()
    log, passed, listed = (stage.log.with_name(name) for name in ("prove.jsonl", "passed.txt", "chosen.txt"))
    log.unlink(missing_ok=True)
    listed.unlink(missing_ok=True)
    passed.write_text("\n".join(records.done("prove", math.inf)))
    chosen = tests or (REHEARSED if stage.order["tiny"] else ("-m", "gpu or multi_gpu"))
    command = [sys.executable, "-m", "pytest", "-p", "tools.lab.prove", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-n1", f"--max-worker-restart={RESTARTS}", f"--timeout={limit}", "--timeout-method=thread"]
    command += [f"--report-log={log}", *chosen]
    local = f"org/optimizer={stage.order['variants']}"
    status = run(stage, command, LOCAL_KERNELS=local, **{PASSED: str(passed), CHOSEN: str(listed)})
    found = read_log(log)
    for node, verdict in found.items():
        append(records.file, Record("prove", node, STATUSES[verdict.outcome], verdict.seconds, verdict.message[:2000]))
    append(records.file, verdict_of_run(status, time.time() - began, stage.log, listed, uncollected(log)))
    if status is None:
        print(f"[prove] its time is over: {len(found)} tests came to their end")
    note_unreached(records, listed)  # pytest may also stop by itself, after too many crashes
    return not records.left("prove")


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


def note_unreached(records: Records, listed: Path) -> None:
    """Record those of the listed tests as cut that have no record yet."""
    known = records.of("prove")
    for node in listed.read_text().splitlines() if listed.exists() else ():
        if node not in known:
            append(records.file, Record("prove", node, "cut", 0.0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that have passed before."""
    passed = set(Path(os.environ[PASSED]).read_text().splitlines())
    done = [item for item in items if item.nodeid in passed]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in passed]


def pytest_collection_finish(session: pytest.Session) -> None:
    """List the tests that are to run; the list appears all at once, as the process may be killed at any time."""
    listed = Path(os.environ[CHOSEN])
    unfinished = listed.with_suffix(f".{os.getpid()}")
    unfinished.write_text("\n".join(item.nodeid for item in session.items))
    unfinished.replace(listed)


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
