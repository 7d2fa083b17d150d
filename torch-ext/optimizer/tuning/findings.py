"""What a contest finds: first each candidate is proven, then the correct ones are timed."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Callable, ContextManager, Mapping, NamedTuple, Optional

import torch

from ..kernels.autocast import without_autocast
from ..kernels.speeds.machine import key_of
from ..kernels.speeds.measurement_file import JUDGED, Table
from ..kernels.speeds.measurements import candidate_name, failed, keep, own_measurement
from ..kernels.speeds.trials import trial
from .contest import Contest, Task, prove_nothing
from .proof import WrongResultError
from .race import Clock, LostGpuError, Timed, decide, dropping, race

OUT_OF_TIME = "the time budget has no room for it"


class Finding(NamedTuple):
    """The result of a task: the entry (None if nothing was measured), wrong candidates with reasons, and all times.

    `failed_before` are the candidates that were not tried, because they had failed on this machine, with the reasons.
    """

    task: Task
    entry: Optional[Mapping[str, Any]]
    failed: Mapping[str, str]
    summary: str
    times: Mapping[str, Timed] = MappingProxyType({})
    failed_before: Mapping[str, str] = MappingProxyType({})


def is_complete(entry: Optional[Mapping[str, Any]]) -> bool:
    """Return whether all candidates of a size were tried; those for which there was no time are tried next time."""
    return entry is not None and not entry.get("untried")


def store(task: Task, entry: Optional[Mapping[str, Any]], wrong: Mapping[str, str]) -> None:
    """Store the entry of a task, if it was measured, and its wrong candidates, if there are any."""
    measured = {} if entry is None else {task.need: entry}
    failed_now = {(task.need.kernel, task.need.dtype): dict(wrong)} if wrong else {}
    if measured or failed_now:
        keep(key_of(task.device), Table(measured, failed_now))


def is_ours(finding: Finding) -> bool:
    """Whether one of the package's products was chosen, not torch's."""
    judged = finding.entry[JUDGED[finding.task.need.kernel][0]]
    return judged != "SINGLE" if isinstance(judged, str) else judged >= 1


@torch.no_grad()
def compete(
    task: Task, contest: Contest, clock: Clock, seconds: Callable[[], float], proofs_end: float = math.inf
) -> Finding:
    """Prove the candidates of a contest, race the correct ones, and return the result.

    After `proofs_end` on the clock no proof begins, and what is proven by then is raced: the default and torch's
    products in any case. When the race begins, `seconds()` says about how long it may take. Candidates that have failed
    on this machine before are left out. RuntimeError is raised for a candidate that made the GPU unusable; one of ours
    counts as wrong. The caller stores the result. If an error or an interrupt ends the contest, the wrong candidates
    are stored here, because they must never be used.
    """
    key = key_of(task.device)
    known = failed(key, task.need.kernel, task.need.dtype)
    known = {name: why for name, why in known.items() if name in contest.candidates}
    kept = own_measurement(key, task.need)
    contest = _continued(contest, kept, task.need.kernel)
    asked = [name for name in contest.candidates if name not in known]
    asked.sort(key=lambda name: (name != contest.before, name != contest.rival))

    def around(name: str) -> ContextManager:  # torch's products have no trial: there is nothing to replace them
        return nullcontext() if name == contest.rival else trial(key, task.need, name)

    wrong: dict[str, str] = {}
    try:
        with without_autocast(task.device.type):
            proofs = {name: contest.candidates[name].prove for name in asked}
            dropped = _proven(proofs, around, lambda: clock.now() < proofs_end, wrong)
            runs = {name: contest.candidates[name].run for name in asked if name not in {**wrong, **dropped}}
            counts = {name: contest.candidates[name].count for name in runs}
            times, more = race(runs, clock, seconds(), around, counts)
    except LostGpuError as error:
        replaceable = error.name != contest.rival
        if replaceable:
            wrong[error.name] = error.why
        store(task, None, wrong)
        raise RuntimeError(
            f"{task.need.kernel} {error.name} made {task.device} unusable for this process: start it again"
            f"{'; it will leave this candidate out' if replaceable else ''} ({error.why})"
        ) from error
    except BaseException:
        store(task, None, wrong)
        raise
    finding = _finding_of(task, contest, times, wrong, {**dropped, **more}, kept is None)
    return finding._replace(entry=_with_earlier(finding.entry, kept, times), failed_before=known)


def _continued(contest: Contest, kept: Optional[Mapping[str, Any]], kernel: str) -> Contest:
    """Return the contest of the candidates for which the last one had no time, against what was chosen then."""
    if kept is None or is_complete(kept):
        return contest
    chosen = candidate_name(kept, kernel) if kept.get("gain", 1.0) >= 1 else contest.rival
    names = {chosen, contest.rival, *kept["untried"]}
    left = {name: candidate for name, candidate in contest.candidates.items() if name in names}
    if chosen not in left:
        return contest._replace(candidates=left, before=contest.rival)
    left[chosen] = left[chosen]._replace(prove=prove_nothing)  # so each call has time for another candidate
    return contest._replace(candidates=left, before=chosen)


def _with_earlier(
    entry: Optional[Mapping[str, Any]], kept: Optional[Mapping[str, Any]], times: Mapping[str, Timed]
) -> Optional[Mapping[str, Any]]:
    """Return `entry` with the times of an incomplete measurement `kept`; or `kept`, if nothing new was timed."""
    if kept is None or is_complete(kept):
        return entry
    if entry is None:  # nothing at all was timed, which says nothing of those that were not tried
        return kept
    if times.keys().isdisjoint(kept["untried"]):
        return {**kept, "untried": entry.get("untried", [])}
    earlier, seconds = kept.get("seconds"), entry.get("seconds")
    return {**entry, "seconds": {**earlier, **seconds}} if isinstance(earlier, dict) else entry


def _finding_of(
    task: Task,
    contest: Contest,
    times: Mapping[str, Timed],
    wrong: Mapping[str, str],
    dropped: Mapping[str, str],
    is_first: bool,
) -> Finding:
    """Return the result of a race, without the candidates that were wrong or dropped.

    `is_first` says that the task has no earlier measurement.
    """
    if not times:
        problems = "; ".join(f"{name}: {why}" for name, why in {**wrong, **dropped}.items())
        return left_out(task, f"nothing could be timed ({problems})", wrong)
    winner = decide(times, contest.before)
    sentences = [f"{named(task)}: {contest.candidates[winner].label}"]
    if winner != contest.rival and contest.rival in times:
        sentences[0] += f", {times[contest.rival].seconds / times[winner].seconds:.2f} times as fast as torch's"
    sentences += [f"{name} failed its proof: {why}" for name, why in wrong.items()]
    sentences += [f"{name} is left out: {why}" for name, why in dropped.items()]
    # If none of ours ran, perhaps a disk was full: the next call tries them once more.
    accident = is_first and times.keys() <= {contest.rival}
    untried = [name for name, why in dropped.items() if accident or why == OUT_OF_TIME]
    entry = {**contest.entry(winner, times), **({"untried": untried} if untried else {})}
    return Finding(task, entry, wrong, "; ".join(sentences), times)


def left_out(task: Task, why: str, wrong: Optional[Mapping[str, str]] = None) -> Finding:
    """Return the finding that a task keeps its default choice; `wrong` has candidates that failed their proof."""
    return Finding(task, None, wrong or {}, f"{named(task)} keeps its default: {why}")


def _proven(
    proofs: Mapping[str, Callable[[], None]],
    around: Callable[[str], ContextManager],
    in_time: Callable[[], bool],
    wrong: dict[str, str],
) -> dict[str, str]:
    """Return the candidates that could not be proven this time, with reasons; those that are wrong go into `wrong`.

    The first two are proven in any case, others only as long as it is `in_time`. Raises LostGpuError if one makes the
    GPU unusable, and out-of-memory errors.
    """
    dropped: dict[str, str] = {}
    for number, (name, prove) in enumerate(proofs.items()):
        if number > 1 and not in_time():
            dropped[name] = OUT_OF_TIME
            continue
        with dropping(name, dropped), around(name):
            try:
                prove()
            except WrongResultError as error:
                wrong[name] = str(error)
    return dropped


def named(task: Task) -> str:
    """Return how messages name a task."""
    return f"{task.need.m} x {task.need.k} {task.need.dtype} {task.need.kernel}"
