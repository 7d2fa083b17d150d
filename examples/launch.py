"""What the examples with several processes share: options, the group, learning rates, progress and a clean end."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import kernels
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .character_model.training import learning_rate_factor

REPO_ID = "org/optimizer"


def parser_of(description: str, layouts: tuple[str, ...], layout: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every example; `layout` is the default layout."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=layouts, default=layout)
    parser.add_argument("--steps", type=int, default=40, help="of the whole run: %(default)s")
    parser.add_argument("--stop-after", type=int, help="end, and save, after this step")
    parser.add_argument("--checkpoint", type=Path, help="folder into which the end is saved")
    parser.add_argument("--resume", action="store_true", help="begin with what is in --checkpoint")
    parser.add_argument("--result", type=Path, help="JSON file for the losses")
    parser.add_argument("--text-bytes", type=int, default=1_000_000, help="of the training text: %(default)s")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of the variants: %(default)s")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if options.stop_after is not None and not 0 < options.stop_after <= options.steps:
        parser.error(f"--stop-after must be one of the --steps, 1 to {options.steps}, got {options.stop_after}")
    return options


def steps_after(first: int, options: argparse.Namespace) -> range:
    """Return the steps to take after the `first` ones; SystemExit if the run ends before its checkpoint."""
    last = options.stop_after or options.steps
    if first > last:
        raise SystemExit(f"{options.checkpoint} is of step {first}, and this run ends at step {last}")
    return range(first, last)


def load_kernel(build: Path) -> ModuleType:
    """Return the kernel from the folder of its variants, or from where LOCAL_KERNELS says."""
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={build.resolve()}")
    return kernels.get_kernel(REPO_ID, version=0, backend="cpu", trust_remote_code=True)


@contextlib.contextmanager
def processes(together: bool) -> Iterator[None]:
    """Join the other processes, if there are any, over gloo, for the time of the block; each works with one thread."""
    torch.set_num_threads(1)
    if not together:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()  # no process leaves while another one still communicates with it
    finally:
        dist.destroy_process_group()


def check_processes(layout: str, possible: Sequence[int]) -> None:
    """SystemExit unless the number of processes is a possible one."""
    if dist.get_world_size() not in possible:
        *rest, last = map(str, possible)
        needed = f"{', '.join(rest)} or {last}" if rest else last
        raise SystemExit(f"--layout {layout} needs {needed} processes, got {dist.get_world_size()}")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def set_learning_rate(optimizer, full: float, step: int, steps: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = full * learning_rate_factor(step, steps)


@contextlib.contextmanager
def progress(steps: int, layout: str) -> Iterator:
    """Yield a function that takes the loss of each step; the first process shows progress with it."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, disable=rank() != 0) as bars:
        bar = bars.add_task(layout, total=steps)
        yield lambda loss: bars.update(bar, advance=1, description=f"{layout}  loss {loss:.3f}")


def leave() -> NoReturn:
    """End the process, which has succeeded, without finalizing Python.

    A thread of gloo needs Python's lock to release a tensor that it has sent. If finalization has begun, it aborts the
    process (pytorch issue 190489). Destroying a group ends its threads only if nothing else refers to it, but DTensor's
    caches refer to meshes, and meshes to their groups.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
