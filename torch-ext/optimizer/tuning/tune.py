"""Measures sizes that were not measured yet, the largest work first, until a time budget ends."""

from __future__ import annotations

import math
import operator
import sys
from functools import partial
from numbers import Real
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence, Union

import torch

from ..iteration import check_work_dtype, default_work_dtype
from ..kernels.capabilities import check_device
from ..kernels.formats import dtype_name
from ..kernels.products import triton_fault
from ..kernels.speeds.machine import key_of
from ..kernels.speeds.measurement_file import Need
from ..kernels.speeds.measurements import failed, own_measurement
from .contest import Contest, Task, cpu_contest, tasks_of
from .findings import OUT_OF_TIME, Finding, compete, is_complete, is_ours, left_out, named, store
from .gpu_contest import gpu_contest
from .progress import Line, Progress
from .race import Clock, lacks_memory

# torch counts the bytes of a tensor in 63 bits. So many entries of 8 bytes take half of what it can count.
_MOST_ENTRIES = 2**59

# Does one part of a long call when its turn comes, and returns what it did in words.
Stage = Callable[[], str]


class Tuner:
    """Measures one task after the other until its time budget is used up."""

    def __init__(self, budget: float, clock: Optional[Callable[[torch.device], Clock]] = None):
        self._clock = clock or Clock
        self._budget = budget
        self._end: Optional[float] = None  # set when measuring begins
        self.findings: list[Finding] = []

    def begin(self, device: torch.device) -> tuple[Clock, float]:
        """Return the clock of a device and when the budget ends on it. The budget begins at the first call."""
        clock = self._clock(device)
        self._end = clock.now() + self._budget if self._end is None else self._end
        return clock, self._end

    def measure(self, task: Task, waiting: int) -> Finding:
        """Measure a task, store the result and return it. `waiting` other tasks share the remaining time.

        The task's share is the remaining time divided by the number of tasks. Its race gets what its proofs leave of
        that, but at least LEAST_ROUNDS rounds. Proofs may exceed the share, but if other tasks wait, none begins after
        half of the remaining time: otherwise those tasks might never be measured.
        """
        clock, end = self.begin(task.device)
        now = clock.now()
        if now >= end:
            return self._as_before(task, OUT_OF_TIME, {})
        of = key_of(task.device), task.need.kernel, task.need.dtype
        known = set(failed(*of))
        share, proofs_end = now + (end - now) / (waiting + 1), now + (end - now) / (2 if waiting else 1)
        try:
            finding = compete(task, contest_of(task), clock, lambda: share - clock.now(), proofs_end)
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            wrong = {name: why for name, why in failed(*of).items() if name not in known}
            return self._as_before(task, "there is too little free memory", wrong)
        store(task, finding.entry, finding.failed)
        return self._noted(finding)

    def leave(self, task: Task) -> Finding:
        """Record, and return as a finding, that a task keeps its default choice."""
        return self._noted(left_out(task, OUT_OF_TIME))

    def note(self, task: Task, kept: Mapping[str, Any]) -> Finding:
        """Record, and return as a finding, an entry that was measured before."""
        return self._noted(_measured_before(task, kept))

    def _as_before(self, task: Task, why: str, wrong: Mapping[str, str]) -> Finding:
        """Record, and return as a finding, that a task keeps an incomplete measurement's choice, or else its default.

        `wrong` are the candidates that have failed their proof now.
        """
        kept = own_measurement(key_of(task.device), task.need)
        finding = left_out(task, why) if kept is None else _measured_before(task, kept)
        return self._noted(finding._replace(failed=wrong))

    def left(self) -> set[Need]:
        """Return the needs that keep their default choice."""
        return {finding.task.need for finding in self.findings if finding.entry is None}

    def _noted(self, finding: Finding) -> Finding:
        self.findings.append(finding)
        return finding

    def summary(self) -> str:
        """Return one line about what was chosen."""
        measured = [finding for finding in self.findings if finding.entry is not None]
        before = sorted({f"{name} ({why})" for each in self.findings for name, why in each.failed_before.items()})
        left = [named(finding.task) for finding in self.findings if finding.entry is None]
        wrong = sorted({f"{name} ({why})" for finding in self.findings for name, why in finding.failed.items()})
        parts = [_counted("measured", measured)]
        parts += [f"{len(left)} left to their default ({', '.join(left)})"] if left else []
        parts += [f"left out as they failed before: {', '.join(before)}"] if before else []
        parts += [f"failed their proof: {', '.join(wrong)}"] if wrong else []
        return ", ".join(parts if before or wrong else [*parts, "none failed"])


def _counted(done: str, findings: Sequence[Finding]) -> str:
    wins = sum(map(is_ours, findings))
    return f"{done} {len(findings)} products: {wins} ours, {len(findings) - wins} torch's"


def _measured_before(task: Task, kept: Mapping[str, Any]) -> Finding:
    return Finding(task, kept, {}, f"{named(task)}: measured before")


def unmeasured(tasks: Iterable[Task]) -> list[Task]:
    """Return, in their order, the tasks that this machine has not measured, then those whose measurement is incomplete.

    One task for each need: the one with the largest count.
    """
    largest: dict[tuple, Task] = {}
    for task in tasks:
        key = key_of(task.device)
        if key is not None and not is_complete(own_measurement(key, task.need)):
            before = largest.get((key, task.need))
            if before is None or task.count > before.count:
                largest[key, task.need] = task
    return sorted(largest.values(), key=lambda task: own_measurement(key_of(task.device), task.need) is not None)


def largest_first(tasks: Iterable[Task]) -> list[Task]:
    """Return tasks by the work of a step, most first: there a better choice saves most. All ranks have one order."""
    return sorted(tasks, key=lambda task: (-task.count * _work(task), task.need, str(task.device)))


def stages_of(tuner: Tuner, tasks: Sequence[Task]) -> list[Stage]:
    """Return a stage for each task."""

    def stage(i: int, task: Task) -> str:
        return tuner.measure(task, len(tasks) - 1 - i).summary

    return [partial(stage, i, task) for i, task in enumerate(tasks)]


def tune(
    shapes: Iterable[Sequence[int]],
    *,
    device: Union[torch.device, str, None] = None,
    dtype: Optional[torch.dtype] = None,
    budget: float = 60.0,
    progress: Optional[Progress] = None,
) -> None:
    """Prove and time the products for matrices of `shapes` on a device, and store the results in the user's cache.

    Like `Muon.warmup`, it frees cuBLAS's workspaces: call it before you capture CUDA graphs of your own. Each shape is
    (rows, cols) or (count, rows, cols); a tall shape means the same as its transpose. `device` None is the current GPU,
    or the CPU if there is none. `dtype` is that of the products; None is what `Muon` uses by default there. Sizes that
    this machine has measured are not measured again; where the time was up before all candidates had been tried, the
    rest is tried now. If you build images: the folder is $XDG_CACHE_HOME/optimizer, by default ~/.cache/optimizer.
    `Muon.warmup` does the same for its own matrices.

    `budget` is about how many seconds all of this takes, proofs included. Sizes with most work come first. The size
    that is being measured when the time is up is finished, with the fewest rounds. Those after it keep what they have,
    and the progress names them. `progress(done, total, what)` is called after each size, and for a summary, which also
    says why if nothing was measured; None draws a line. Raises ValueError or TypeError for shapes, dtypes, devices and
    budgets that make no sense, before anything is measured.
    """
    check_call(budget, progress)
    if not isinstance(shapes, Iterable):
        raise TypeError(f"shapes must be a list of (rows, cols) or (count, rows, cols), got {shapes!r}")
    place = _checked_device(device)
    wanted = check_work_dtype(dtype, place) or default_work_dtype(torch.empty(0, dtype=torch.float32, device=place))
    needed = [task for shape in map(_checked_shape, shapes) for task in tasks_of(place, wanted, *shape)]
    tasks = unmeasured(largest_first(needed))
    tuner, report = Tuner(budget), Line("tune") if progress is None else progress
    stages = [*stages_of(tuner, tasks), tuner.summary] if tasks else [partial(_known, needed, place, wanted)]
    for done, stage in enumerate(stages, 1):
        report(done, len(stages), stage())


def _known(tasks: Sequence[Task], device: torch.device, dtype: torch.dtype) -> str:
    """Return in words why there is nothing to measure: all tasks were measured before, or there is no choice."""
    if not tasks:
        fault = triton_fault(device)
        why = f", as Triton cannot launch here ({fault})" if fault else ""
        return f"torch's products are the only ones for {dtype_name(dtype)} matrices of these shapes on {device}{why}"
    findings = {task.need: _measured_before(task, own_measurement(key_of(task.device), task.need)) for task in tasks}
    return _counted("already measured", list(findings.values()))


def check_call(budget: float, progress: Optional[Progress]) -> None:
    """Raise TypeError or ValueError unless a budget is a number of seconds, at least 0, and progress can be called."""
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress must be a function of done, total and what, or None, got {progress!r}; the seconds that it may "
            "take are budget=..."
        )
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise TypeError(f"budget must be a number of seconds, got {budget!r}")
    seconds = budget if isinstance(budget, int) else float(budget)
    if not (0 <= seconds <= sys.float_info.max or seconds == math.inf):
        raise ValueError(f"budget must be at least 0 seconds, and at most {sys.float_info.max} or inf, got {budget}")


def contest_of(task: Task) -> Contest:
    """Return the contest for a task."""
    return cpu_contest(task) if task.need.kernel == "cpu_products" else gpu_contest(task)


def _work(task: Task) -> int:
    """Return the multiplications of a product of one matrix."""
    return task.need.m**2 * task.need.k


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _checked_device(device: Union[torch.device, str, None]) -> torch.device:
    """Return the device, None being the default. Raises ValueError unless it is a CPU, or a usable GPU that is here."""
    try:
        place = _default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a CPU or a GPU that is here, got {device!r}") from error
    here = {"cpu": 1, "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0}.get(place.type, 0)
    if (place.index or 0) >= here:
        raise ValueError(f"device must be a CPU or a GPU that is here, got {device!r}")
    check_device(place)
    return _default_device() if place == torch.device("cuda") else place


def _checked_shape(shape: Sequence[int]) -> tuple[tuple[int, int], int]:
    """Return the sides, the short one first, and the number of matrices."""
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        sizes = ()
    if len(sizes) not in (2, 3) or min(sizes) < 1 or any(isinstance(size, bool) for size in shape):
        raise ValueError(
            f"shapes must be a list of (rows, cols) or (count, rows, cols), all integers of at least 1, got {shape!r}"
        )
    if math.prod(sizes) > _MOST_ENTRIES:
        raise ValueError(f"the matrices of a shape must have at most {_MOST_ENTRIES} entries in all, got {shape!r}")
    rows, cols = sizes[-2:]
    return (min(rows, cols), max(rows, cols)), math.prod(sizes[:-2])
