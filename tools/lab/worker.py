"""A stage in a process of its own: runs its items one by one and tells on stdout, in lines of JSON, how each ended.

    echo '{"stage": ..., "skip": [...], ...}' | python -m tools.lab.worker

What items print goes to stderr. After an error that leaves the GPU unusable the process ends, for a new one to go on.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.built_kernel import find_variant, load_variant
from tools.lab.items import Item, Lab, NotApplicableError, WrongResultError, loses_gpu

GPU_LOST = 3


def main() -> int:
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    order = json.load(sys.stdin)
    lab = make_lab(order)
    items = importlib.import_module(order["module"]).items(lab)
    # What failed before is tried again after what was never tried.
    waiting = [item for item in items if item.key not in order["skip"]]
    waiting.sort(key=lambda item: item.key in order["failed"])
    gc.freeze()  # what is there now stays: collecting it again would cost time at every graph
    tell(events, {"items": [item.key for item in waiting]})
    for item in waiting:
        tell(events, {"begin": item.key, "limit": item.limit})
        ended, lost = attempt(item)
        tell(events, {"ended": item.key, **ended})
        if lost:
            return GPU_LOST
    tell(events, {"finished": True})
    return 0


def make_lab(order: dict) -> Lab:
    if order["tiny"]:
        # Only now: the kernels' module reads TRITON_INTERPRET when it is imported.
        importlib.import_module("tests.support.triton_interpreter").repair_bfloat16()
    variants, out = Path(order["variants"]), Path(order["out"])
    kernel = load_variant(find_variant(variants))
    configs = tuple(map(Path, order["configs"]))
    return Lab(kernel, torch.device(order["device"]), variants, out, configs, order["tiny"], order["until"])


def tell(events, event: dict) -> None:
    print(json.dumps(event), file=events, flush=True)


def attempt(item: Item) -> tuple[dict, bool]:
    """Return how an item ended, and whether the GPU is lost to this process."""
    start, lost = time.perf_counter(), False
    status, problem, value = "ok", "", None
    try:
        value = item.run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an error of a kernel shows up here at the latest
    except NotApplicableError as reason:
        status, problem = "skipped", str(reason)
    except WrongResultError as found:
        status, problem, value = "failed", str(found), found.value
    except torch.cuda.OutOfMemoryError as error:
        status, problem = "failed", f"out of memory: {str(error).splitlines()[0]}"
        torch.cuda.empty_cache()
    except Exception as error:
        traceback.print_exc()
        status, problem = "failed", f"{type(error).__name__}: {str(error)[:500]}"
        lost = loses_gpu(error)
    return {"status": status, "problem": problem, "value": value, "seconds": time.perf_counter() - start}, lost


if __name__ == "__main__":
    sys.exit(main())
