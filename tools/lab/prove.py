"""Stage 2: the tests that need a GPU, run by pytest in a process that may hang, die or lose the GPU at one of them.

pytest-timeout ends a worker that hangs, pytest-xdist starts another one and continues, and pytest-reportlog writes each
verdict as it comes. This module is also a plugin of that run. It leaves out tests that passed in an earlier run, and
ends a worker that has lost its GPU, because all later tests would fail in it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.report_log import read_log
from tools.lab.items import loses_gpu
from tools.lab.records import Record, Records, append
from tools.lab.runner import Stage, last_line, run

LIMIT_SECONDS = 180
RESTARTS = 100
GPU_LOST, NO_TESTS = 3, 5
STATUSES = {"passed": "ok", "failed": "failed", "skipped": "skipped"}
PASSED = "OPTIMIZER_LAB_PASSED"

# For a dry run: a few tests that need no GPU, run in the same way.
REHEARSED = ("tests/muon/test_device.py", "-m", "not gpu", "-k", "scaled")


def prove(stage: Stage, records: Records, tests: tuple[str, ...] = (), limit: int = LIMIT_SECONDS) -> bool:
    """Run the tests that need a GPU and have not passed, and record each. Return whether all of them were reached."""
    began = time.time()
    log, passed = stage.log.with_name("prove.jsonl"), stage.log.with_name("passed.txt")
    log.unlink(missing_ok=True)
    passed.write_text("\n".join(key for key, record in records.of("prove").items() if record.status != "failed"))
    chosen = tests or (REHEARSED if stage.order["tiny"] else ("-m", "gpu or multi_gpu"))
    command = [sys.executable, "-m", "pytest", "-p", "tools.lab.prove", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-n1", f"--max-worker-restart={RESTARTS}", f"--timeout={limit}", "--timeout-method=thread"]
    command += [f"--report-log={log}", *chosen]
    local = f"org/optimizer={stage.order['variants']}"
    status = run(stage, command, LOCAL_KERNELS=local, **{PASSED: str(passed)})
    found = read_log(log)
    for node, verdict in found.items():
        append(records.file, Record("prove", node, STATUSES[verdict.outcome], verdict.seconds, verdict.said[:2000]))
    broken = status not in (None, 0, 1, NO_TESTS)  # it failed to start, for example at a file that cannot be imported
    problem = f"it ended with status {status}; {last_line(stage.log)}" if broken else ""
    append(records.file, Record("prove", "pytest", "failed" if broken else "ok", time.time() - began, problem))
    if status is None:
        print(f"[prove] its time is over: {len(found)} tests came to their end")
    return status is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that have passed before."""
    passed = set(Path(os.environ[PASSED]).read_text().splitlines())
    done = [item for item in items if item.nodeid in passed]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in passed]


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
