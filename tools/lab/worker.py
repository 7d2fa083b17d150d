"""Runs a stage's items one by one in a process and records how each ended.

    echo '{"stage": "tune", "skip": [...], ...}' | python -m tools.lab.worker

An item is recorded as failed before it begins. That record stays if the item hangs or kills the process.
After an error that makes the GPU unusable the process ends, too, and a new one continues. Items that have no record yet
are recorded as cut at the start, so that a run that ends early leaves behind what there is to do.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.built_kernel import find_variant, load_variant
from tools.lab.items import CutError, FailedError, Item, Lab, NotApplicableError, loses_gpu
from tools.lab.records import FILE, UNFINISHED, Record, append, clock, read

GPU_LOST = 3


def main() -> int:
    order = json.load(sys.stdin)
    lab = make_lab(order)
    # Items that failed before come after those that were never tried.
    items = list(importlib.import_module(order["module"]).items(lab))
    again = {item.key for item in items if item.again} - set(order["ended"])
    waiting = [item for item in items if item.key in again or item.key not in order["skip"]]
    waiting.sort(key=lambda item: item.key in order["failed"])
    partial = note_waiting(order["stage"], waiting, lab.out / FILE)
    gc.freeze()  # these objects stay; collecting them again would cost time at every graph
    for place, item in enumerate(waiting, 1):
        problem = UNFINISHED.format(f"{item.limit:g}")
        began = Record(order["stage"], item.key, "failed", 0.0, problem, partial.get(item.key))
        append(lab.out / FILE, began)
        faulthandler.dump_traceback_later(item.limit, exit=True)
        ended, lost = attempt(item, began)
        faulthandler.cancel_dump_traceback_later()
        append(lab.out / FILE, ended)
        left = f"{len(waiting) - place} to go, {clock(lab.until - time.monotonic())} left"
        print(f"[{ended.stage}] {item.key}: {ended.status} ({ended.seconds:.1f} s; {left}) {ended.problem}", flush=True)
        if lost:
            return GPU_LOST
    return 0


def note_waiting(stage: str, waiting: Sequence[Item], file: Path) -> dict[str, object]:
    """Record items that have no record yet as cut. Return, by its key, what each item has found that runs once more."""
    records = {record.key: record for record in read(file)[1] if record.stage == stage}
    for item in waiting:
        if item.key not in records:
            append(file, Record(stage, item.key, "cut", 0.0))
    return {key: record.value for key, record in records.items()}


def make_lab(order: dict) -> Lab:
    if order["tiny"]:
        # Imported here: the kernels' module reads TRITON_INTERPRET when it is imported.
        importlib.import_module("tests.support.triton_interpreter").repair()
    variants, out = Path(order["variants"]), Path(order["out"])
    configs = tuple(map(Path, order["configs"]))
    kernel, device = load_variant(find_variant(variants)), torch.device(order["device"])
    return Lab(kernel, device, variants, out, configs, order["tiny"], order["until"])


def attempt(item: Item, began: Record) -> tuple[Record, bool]:
    """Return how an item ended, and whether this process has lost the GPU."""
    start, lost = time.perf_counter(), False
    status, problem, value = "ok", "", None
    try:
        value = item.run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an error of a kernel shows up here at the latest
    except NotApplicableError as reason:
        status, problem = "skipped", str(reason)
    except CutError as outcome:
        status, problem, value = "cut", str(outcome), outcome.value
    except FailedError as outcome:
        status, problem, value = "failed", str(outcome), outcome.value
        lost = outcome.__cause__ is not None and loses_gpu(outcome.__cause__)
    except torch.cuda.OutOfMemoryError as error:
        status, problem = "failed", f"out of memory: {str(error).splitlines()[0]}"
        torch.cuda.empty_cache()
    except Exception as error:
        traceback.print_exc()
        status, problem = "failed", f"{type(error).__name__}: {str(error)[:500]}"
        lost = loses_gpu(error)
    seconds = time.perf_counter() - start
    return replace(began, status=status, problem=problem, value=value, seconds=seconds, at=time.time()), lost


if __name__ == "__main__":
    sys.exit(main())
