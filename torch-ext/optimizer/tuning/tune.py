"""Measures sizes that have no measurement yet: first each candidate is proven, then the correct ones are timed."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, ContextManager, Iterable, Mapping, NamedTuple, Optional, Sequence, Union

import torch

from ..iteration import check_work_dtype, default_work_dtype
from ..kernels.autocast import without_autocast
from ..kernels.capabilities import check_device
from ..kernels.machine import key_of
from ..kernels.measurement_file import JUDGED, Need, Table
from ..kernels.measurements import failed, keep, own_measurement
from ..kernels.trials import trial
from .contest import Contest, Task, cpu_contest, tasks_of
from .gpu_contest import gpu_contest
from .progress import Line, Progress
from .proof import WrongResultError
from .race import Clock, LostGpuError, Timed, decide, dropping, lacks_memory, race

# Does one part of a long call when its turn comes, and returns what it did in words.
Stage = Callable[[], str]


class Finding(NamedTuple):
    """The result of a task: the entry (None if nothing was measured), wrong candidates with reasons, and all times."""

    task: Task
    entry: Optional[Mapping[str, Any]]
    failed: Mapping[str, str]
    said: str
    times: Mapping[str, Timed] = MappingProxyType({})


class Tuner:
    """Measures one task after the other until its time budget is used up."""

    def __init__(self, budget: float, clock: Optional[Callable[[torch.device], Clock]] = None):
        self._clock = clock or Clock
        self._budget = budget
        self._end: Optional[float] = None  # set when the first measurement begins
        self.findings: list[Finding] = []

    def measure(self, task: Task, waiting: int) -> Finding:
        """Measure a task, store the result and return it. `waiting` other tasks share the remaining time."""
        clock = self._clock(task.device)
        self._end = clock.now() + self._budget if self._end is None else self._end
        left = self._end - clock.now()
        if left <= 0:
            return self.leave(task)
        try:
            finding = compete(task, contest_of(task), clock, left / (waiting + 1))
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            return self.leave(task, "there is too little free memory")
        found = {task.need: finding.entry} if finding.entry is not None else {}
        if found or finding.failed:
            keep(key_of(task.device), Table(found, wrong_of(finding)))
        return self._noted(finding)

    def leave(self, task: Task, why: str = "the time budget is used up") -> Finding:
        """Record that a task keeps its default choice."""
        return self._noted(Finding(task, None, {}, f"{_named(task)} keeps its default: {why}"))

    def note(self, task: Task, kept: Mapping[str, Any]) -> Finding:
        """Record an entry that was measured before."""
        return self._noted(Finding(task, kept, {}, f"{_named(task)}: measured before"))

    def left(self) -> set[Need]:
        """Return the needs that keep their default choice."""
        return {finding.task.need for finding in self.findings if finding.entry is None}

    def _noted(self, finding: Finding) -> Finding:
        self.findings.append(finding)
        return finding

    def summary(self) -> str:
        """Return one line about what was chosen."""
        measured = [finding for finding in self.findings if finding.entry is not None]
        ours = sum(is_ours(finding) for finding in measured)
        left = len(self.findings) - len(measured)
        wrong = sorted({f"{name} ({why})" for finding in self.findings for name, why in finding.failed.items()})
        parts = [f"measured {len(measured)} products: {ours} ours, {len(measured) - ours} torch's"]
        parts += [f"{left} left to their default"] if left else []
        return ", ".join([*parts, f"failed their proof: {', '.join(wrong)}" if wrong else "none failed"])


def wrong_of(finding: Finding) -> dict[tuple[str, str], dict[str, str]]:
    """Return the candidates of a finding that are wrong, in the form of a table."""
    need = finding.task.need
    return {(need.kernel, need.dtype): dict(finding.failed)} if finding.failed else {}


def is_ours(finding: Finding) -> bool:
    """Whether one of the package's products was chosen, not torch's."""
    judged = finding.entry[JUDGED[finding.task.need.kernel][0]]
    return judged != "SINGLE" if isinstance(judged, str) else judged >= 1


def unmeasured(tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks that this machine has not measured. One task for each need: the one with the largest count."""
    largest: dict[tuple, Task] = {}
    for task in tasks:
        key = key_of(task.device)
        if key is not None and own_measurement(key, task.need) is None:
            before = largest.get((key, task.need))
            if before is None or task.count > before.count:
                largest[key, task.need] = task
    return list(largest.values())


def stages_of(tuner: Tuner, tasks: Sequence[Task]) -> list[Stage]:
    """Return a stage for each task."""

    def stage(i: int, task: Task) -> str:
        return tuner.measure(task, len(tasks) - 1 - i).said

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

    Each shape is (rows, cols) or (count, rows, cols); a tall shape means the same as its transpose. `device` None is
    the current GPU, or the CPU if there is none. `dtype` is that of the products; None is what `Muon` uses by default
    there. Sizes that this machine has measured are not measured again. If you build images: the folder is
    $XDG_CACHE_HOME/optimizer, by default ~/.cache/optimizer. `Muon.warmup` does the same for its own matrices.

    `budget` is in seconds and is checked between measurements. Sizes that it leaves out keep their default, and the
    progress says so. `progress(done, total, what)` is called after each measurement; None draws a line. Raises
    ValueError or TypeError for shapes, dtypes, devices and budgets that make no sense, before anything is measured.
    """
    check_budget(budget)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function of done, total and what, or None, got {progress!r}")
    place = _checked_device(device)
    wanted = check_work_dtype(dtype, place) or default_work_dtype(torch.empty(0, device=place))
    tasks = unmeasured(task for shape in map(_checked_shape, shapes) for task in tasks_of(place, wanted, *shape))
    tuner, report = Tuner(budget), progress or Line("tune")
    stages = [*stages_of(tuner, tasks), tuner.summary] if tasks else []
    for done, stage in enumerate(stages, 1):
        report(done, len(stages), stage())


def check_budget(budget: float) -> None:
    """Raise TypeError or ValueError unless a budget is a number of seconds, at least 0."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"budget must be a number of seconds, got {budget!r}")
    if not budget >= 0:
        raise ValueError(f"budget must be at least 0 seconds, got {budget}")


def contest_of(task: Task) -> Contest:
    """Return the contest for a task."""
    return cpu_contest(task) if task.need.kernel == "cpu_products" else gpu_contest(task)


@torch.no_grad()
def compete(task: Task, contest: Contest, clock: Clock, seconds: float) -> Finding:
    """Prove the candidates of a contest, race the correct ones for about `seconds`, and return the result.

    Candidates that have failed on this machine before are left out. Nothing is stored, with one exception: a candidate
    that made the GPU unusable, for which RuntimeError is raised.
    """
    key = key_of(task.device)
    known = failed(key, task.need.kernel, task.need.dtype)
    asked = [name for name in contest.candidates if name not in known]

    def around(name: str) -> ContextManager:  # torch's products have no trial: there is nothing to replace them
        return nullcontext() if name == contest.rival else trial(key, task.need, name)

    try:
        with without_autocast(task.device.type):
            wrong, dropped = _proven({name: contest.candidates[name].prove for name in asked}, around)
            runs = {name: contest.candidates[name].run for name in asked if name not in {**wrong, **dropped}}
            times, more = race(runs, clock, seconds, around)
    except LostGpuError as lost:
        keep(key, Table({}, {(task.need.kernel, task.need.dtype): {lost.name: lost.why}}))
        raise RuntimeError(
            f"{task.need.kernel} {lost.name} made {task.device} unusable for this process: start it again; it will "
            f"leave this candidate out ({lost.why})"
        ) from lost
    dropped.update(more)
    if not times:
        said = "; ".join(f"{name}: {why}" for name, why in {**wrong, **dropped}.items())
        return Finding(task, None, wrong, f"{_named(task)} keeps its default: nothing could be timed ({said})")
    winner = decide(times, contest.before)
    sentences = [f"{_named(task)}: {contest.candidates[winner].said}"]
    if winner != contest.rival and contest.rival in times:
        sentences[0] += f", {times[contest.rival].seconds / times[winner].seconds:.2f} times as fast as torch's"
    sentences += [f"{name} failed its proof: {why}" for name, why in wrong.items()]
    sentences += [f"{name} is left out: {why}" for name, why in dropped.items()]
    return Finding(task, contest.entry(winner, times), wrong, "; ".join(sentences), times)


def _proven(
    proofs: Mapping[str, Callable[[], None]], around: Callable[[str], ContextManager]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the candidates that are wrong, and those that could not be proven this time, each with the reason.

    Raises LostGpuError if one makes the GPU unusable, and out-of-memory errors.
    """
    wrong, dropped = {}, {}
    for name, prove in proofs.items():
        with dropping(name, dropped), around(name):
            try:
                prove()
            except WrongResultError as error:
                wrong[name] = str(error)
    return wrong, dropped


def _named(task: Task) -> str:
    return f"{task.need.m} x {task.need.k} {task.need.dtype} {task.need.kernel}"


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _checked_device(device: Union[torch.device, str, None]) -> torch.device:
    """Return the device, None being the default. Raises ValueError unless it is a CPU, or a usable GPU that is here."""
    try:
        place = _default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a CPU or a GPU that is here, got {device!r}") from error
    if place.type not in ("cpu", "cuda") or (place.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device must be a CPU or a GPU that is here, got {device!r}")
    check_device(place)
    return place


def _checked_shape(shape: Sequence[int]) -> tuple[tuple[int, int], int]:
    """Return the sides, the short one first, and the number of matrices."""
    sizes = tuple(shape)
    if len(sizes) not in (2, 3) or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"a shape must be (rows, cols) or (count, rows, cols), all at least 1, got {shape!r}")
    rows, cols = sizes[-2:]
    return (min(rows, cols), max(rows, cols)), math.prod(sizes[:-2])
