"""Stage 4: the sweeps in benchmarks/, each a program that writes a results file, and the ways to launch a step.

Ours is in them as it is made and after a warm-up. Both use the configurations that stage 3 has written.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.result_file import UNMEASURED, facts, has_error
from tools.lab import step_ways
from tools.lab.items import CutError, FailedError, Item, Lab, require_triton
from tools.lab.records import FILE, read, write_whole

ROOT = Path(__file__).resolve().parent.parent.parent


class Sweep(NamedTuple):
    """A program in benchmarks/, its arguments, its share of the stage's time, and the most seconds it may take.

    With `of_triton` it measures one of Triton's kernels alone.
    """

    program: str
    share: int
    limit: float
    options: tuple[str, ...] = ()
    of_triton: bool = False


OUT_OF_TIME = "out of time"
# Seconds for stopping a sweep and reading its results.
END_SECONDS = 5.0
# The share of its time that a sweep is told to use. It also has to load the kernel and to finish its last case.
TOLD = 0.7

MODELS = ("gpt2-124m", "llama-1b", "moe-64")

AGAINST_PEERS = (
    Sweep(
        "sweep_step", 4, 180.0,
        ("--models", ",".join(MODELS), "--contestants", "torch.optim.Muon,AdamW,timm,gram-newton-schulz"),
    ),
    Sweep(
        "sweep_orthogonalize", 4, 180.0,
        # Without torch.compile, which takes seconds for every shape.
        (
            "--shapes", "gpt2-124m,squares,moe-64",
            "--contestants", "torch products,torch.optim.Muon,timm,gram-newton-schulz,flash-muon,dion",
        ),
    ),
)  # fmt: skip

# Short ones first: the time that they do not use goes to the others.
SWEEPS = (
    Sweep("sweep_bookkeeping", 2, 60.0),
    Sweep("sweep_symmetric_gemm", 2, 120.0, of_triton=True),
    Sweep("sweep_training_step", 2, 90.0),
    *AGAINST_PEERS,
)


def items(lab: Lab) -> Iterator[Item]:
    """Yield the items of this stage."""
    first, *others = MODELS
    for sweep in SWEEPS:
        if sweep is AGAINST_PEERS[0]:
            yield ways_of(lab, first)
        yield item_of(lab, sweep)
    for model in others[: 0 if lab.tiny else None]:
        yield ways_of(lab, model)


def item_of(lab: Lab, sweep: Sweep) -> Item:
    return Item(key_of(sweep), partial(measure, lab, sweep), sweep.limit)


def key_of(sweep: Sweep) -> str:
    return sweep.program.removeprefix("sweep_")


def ways_of(lab: Lab, model: str) -> Item:
    return Item(step_ways.key_of(model), partial(step_ways.compare_ways, lab, model), 90.0)


def measure(lab: Lab, sweep: Sweep) -> dict:
    """Run a sweep, which continues the results of a run that was cut or has failed, and return all its results."""
    if sweep.of_triton:
        require_triton(lab)
    file, earlier = lab.out / f"{sweep.program}.json", earlier_results(lab, sweep)
    seconds = seconds_for(sweep, lab.until - time.monotonic())
    if seconds <= 0:
        raise CutError("there was no time left for it", earlier)
    if earlier is None:
        file.unlink(missing_ok=True)
    else:
        write_whole(file, json.dumps({name: value for name, value in earlier.items() if name != "ended"}))
    command = [sys.executable, "-m", f"benchmarks.{sweep.program}", "--build", lab.variants]
    command += ["--tiny"] if lab.tiny else sweep.options
    command += ["--output", file, "--minutes", str(TOLD * seconds / 60)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        status, printed = OUT_OF_TIME, ["it was stopped at the end of its time"]
    else:
        print(done.stdout, done.stderr, sep="\n")
        status, printed = f"status {done.returncode}", (done.stderr or done.stdout).strip().splitlines()
    return judged(status, printed[-1][:300] if printed else "it said nothing", file)


def judged(status: str, last: str, file: Path) -> dict:
    """Return the results that a sweep has left in `file`, which is removed.

    Raises `CutError` if time ended before all was measured, and `FailedError` if the sweep or a row of it failed.
    """
    if not file.exists():
        raise (CutError if status == OUT_OF_TIME else FailedError)(f"{status}, no results; {last}")
    content = {"ended": status, **json.loads(file.read_text())}
    file.unlink()
    wrong = next(filter(has_error, content["results"]), None)
    if wrong is not None:
        raise FailedError(f"{status}; {wrong['case']}: {wrong['status']}", content)
    if status not in ("status 0", OUT_OF_TIME):
        raise FailedError(f"{status}; {last}", content)
    unmeasured = sum(row["status"] == UNMEASURED for row in content["results"])
    if unmeasured:
        raise CutError(f"{unmeasured} of {len(content['results'])} rows are unmeasured", content)
    return content


def earlier_results(lab: Lab, sweep: Sweep) -> dict | None:
    """Return what earlier runs of the sweep have measured; None if none has, or only with other configurations."""
    file = lab.out / f"{sweep.program}.json"
    records = {(record.stage, record.key): record.value for record in read(lab.out / FILE)[1]}
    # A run that was killed has left its file, which began with the record's rows.
    candidates = [json.loads(file.read_text())] if file.exists() else []
    candidates.append(records.get(("measure", key_of(sweep))) or {})
    now = facts(lab.kernel, lab.device, {}).items()
    return next((earlier for earlier in candidates if now <= earlier.items()), None)


def seconds_for(sweep: Sweep, left: float) -> float:
    """Return how long a sweep may run if the stage has `left` seconds for it and those after it."""
    later = SWEEPS[SWEEPS.index(sweep) :]
    return min(sweep.limit, left * sweep.share / sum(other.share for other in later)) - END_SECONDS
