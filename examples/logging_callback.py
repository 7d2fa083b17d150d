"""Live curves of a run: a short callback, for a file that `python -m tools.draw` reads, TensorBoard and trackio.

    log = Callback(opt, Lines("run.jsonl"), every=10, watched=dict(model.named_parameters()))
    for step in range(steps):
        ...
        opt.step()
        log(step, loss)

Reading metrics waits for a GPU, hence `every`; watched layers are copied before each step. TensorBoard and trackio are
imported where they are asked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer

Sink = Callable[[int, dict[str, float]], object]


class Callback:
    """Tells a sink the loss, what `opt.metrics()` has, and the root mean square of each watched layer's update."""

    def __init__(self, opt: Optimizer, sink: Sink, every: int = 1, watched: Mapping[str, Tensor] | None = None):
        self._opt, self._sink, self._every = opt, sink, every
        self._watched, self._before, self._began = dict(watched or {}), {}, time.perf_counter()
        opt.register_step_pre_hook(lambda *_: self._before.update(self._copies()))

    def __call__(self, step: int, loss: Tensor) -> None:
        """Log after `opt.step()`."""
        if step % self._every:
            return
        moved = {name: (p.detach() - self._before[name]).square().mean().sqrt() for name, p in self._watched.items()}
        rms = {f"update_rms/{name}": value for name, value in moved.items()}
        numbers = {"loss": loss.detach(), **self._opt.metrics(), **rms}
        seconds = time.perf_counter() - self._began
        self._sink(step, {"seconds": seconds, **{key: float(value) for key, value in numbers.items()}})

    def _copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._watched.items()}


class Lines:
    """A file with a line of JSON for each call, readable at any time."""

    def __init__(self, path: str | Path):
        self._file = open(path, "w", buffering=1)

    def __call__(self, step: int, numbers: dict[str, float]) -> None:
        metrics = {key: value for key, value in numbers.items() if key not in ("seconds", "loss")}
        line = {"step": step, "seconds": numbers["seconds"], "loss": numbers["loss"], "metrics": metrics}
        self._file.write(json.dumps(line) + "\n")


def tensorboard(folder: str | Path) -> Sink:
    """Return a sink that writes for `tensorboard --logdir FOLDER`; needs the package tensorboard."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def trackio(project: str) -> Sink:
    """Return a sink for the dashboard of `trackio show`; needs the package trackio."""
    run = import_module("trackio").init(project=project)
    return lambda step, numbers: run.log(numbers, step=step)
