"""Which products of a plan need measuring, and how ranks that share matrices agree on one choice.

Sets of ranks that share matrices may overlap. All ranks walk theirs in one order, larger ones first, so that none waits
for a rank that waits for it. In each set, ranks first compare what they have agreed on with others. Then one rank of
each kind of device settles one size after the other, from its file or by measuring, and all of that kind take it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence

from ...kernels.products import triton_fault
from ...kernels.speeds.machine import Key, key_of
from ...kernels.speeds.measurement_file import Need
from ...kernels.speeds.measurements import (
    Agreed,
    agree,
    agreement,
    all_failed,
    has_failed,
    own_measurement,
    record_failures,
)
from ...kernels.user_warnings import warn_user
from ...parameters.names import listed
from ...parameters.sequences import grouped
from ...plan.exchange_options import NAME_THE_RANKS
from ...plan.matrix import Matrix
from ...plan.plan import Plan
from ...plan.process_groups import Ranks, gathered, this_rank, world_size
from ...tuning.contest import Task, tasks_of
from ...tuning.findings import Finding, is_complete, named
from ...tuning.tune import Stage, Tuner, largest_first, stages_of, unmeasured


class TuningStatement(NamedTuple):
    """What a rank knows about the sizes that a set of ranks needs."""

    kind: str  # of its device
    agreed: Mapping[Need, Agreed]  # earlier agreements, with these or other ranks
    failed: Mapping[tuple[str, str], Mapping[str, str]]
    left: Sequence[Need]  # not measured because the time budget of this or another rank was used up
    incomplete: Sequence[Need]  # measured here, but not with all candidates


class Answer(NamedTuple):
    """The result of the rank that measures for its kind of device, or its error."""

    entry: Optional[Mapping[str, Any]]
    failed: Mapping[str, str]
    summary: str
    error: Optional[str] = None


def measure_stages(plan: Plan, tuner: Tuner) -> list[Stage]:
    """Return the stages in which a process measures, or agrees with others, for all its matrices, and sums up.

    A stage warns of matrices of which other processes may have copies that nobody names: for these nothing is measured.
    """
    if world_size() == 1:
        matrices = [matrix for batch in plan.batches for matrix in batch.matrices]
        stages = stages_of(tuner, unmeasured(tasks_of_matrices(matrices)))
    else:
        stages = [stage for ranks in ordered(plan.terms) for stage in _stages_of(ranks, plan, tuner)]
    summary = [tuner.summary] if stages else []
    return [*_warning_stage(plan), *stages, *summary]


def to_measure(ranks: Ranks, plan: Plan) -> str:
    """Return in words what can be measured here for matrices of these ranks: all of them must say the same."""
    tasks = _tasks_among(ranks, plan)
    needs = sorted({f"{need.kernel} {need.dtype} {need.m} x {need.k}" for need in (task.need for task in tasks)})
    devices = {matrix.parameter.device for matrix in _matrices_among(ranks, plan)}
    # Without the error itself, which may name a path or a device of this rank.
    fault = "; Triton fails here, explain() says why" if any(map(triton_fault, devices)) else ""
    return f"kernels that can be measured: {', '.join(needs) or 'none'}{fault}"


def ordered(sets: Iterable[Ranks]) -> list[Ranks]:
    """Return sets of ranks in the order in which all ranks walk them: one that holds others comes before them."""
    return sorted(sets, key=lambda ranks: (-len(ranks), ranks))


def tasks_of_matrices(matrices: Sequence[Matrix]) -> list[Task]:
    """Return the measurements that matrices need, most work first. All ranks that share them have the same list."""
    tasks: dict[tuple[Need, str], Task] = {}
    for alike in grouped(matrices, lambda matrix: matrix.measured_as):
        for task in tasks_of(*alike[0].measured_as, len(alike)):
            key = task.need, str(task.device)
            tasks[key] = max(tasks.get(key, task), task, key=lambda task: task.count)
    return largest_first(tasks.values())


def _warning_stage(plan: Plan) -> list[Stage]:
    if world_size() == 1:
        return []
    alone = [m for matrices in plan.matrices for m in matrices if m.parameter.sharers not in plan.terms]
    names = list(dict.fromkeys(m.parameter.name for m in alone))
    return [partial(_warn_of_unknown_copies, listed(names))] if tasks_of_matrices(alone) else []


def _warn_of_unknown_copies(names: str) -> str:
    text = (
        f"nothing is proven or measured for {names}: other ranks may have copies, which must be multiplied alike, and "
        "this optimizer does not know which ranks"
    )
    warn_user(f"warmup: {text}. {NAME_THE_RANKS}")
    return text


def _stages_of(ranks: Ranks, plan: Plan, tuner: Tuner) -> list[Stage]:
    tasks = _tasks_among(ranks, plan)
    agreement = TuningAgreement(ranks, tasks, tuner, listed(plan.terms[ranks].names))
    settling = [partial(agreement.settle, number) for number in range(len(tasks))]
    return [agreement.compare, *settling] if tasks else []


def _tasks_among(ranks: Ranks, plan: Plan) -> list[Task]:
    return [task for task in tasks_of_matrices(_matrices_among(ranks, plan)) if key_of(task.device) is not None]


def _matrices_among(ranks: Ranks, plan: Plan) -> list[Matrix]:
    return [matrix for matrices in plan.matrices for matrix in matrices if matrix.parameter.sharers == ranks]


class TuningAgreement:
    """Ranks that share some matrices, while they agree on the products for them."""

    def __init__(self, ranks: Ranks, tasks: Sequence[Task], tuner: Tuner, names: str):
        self._ranks, self._tasks, self._tuner, self._names = ranks, list(tasks), tuner, names
        self._kinds: dict[str, int] = {}  # kinds of device, and the rank that measures for each
        self._open: dict[Need, set[str]] = {}  # the kinds of device for which a size is not settled
        self._left: set[Need] = set()

    @property
    def _key(self) -> Key:
        return key_of(self._tasks[0].device)

    def compare(self) -> str:
        """Adopt what some of the ranks have agreed on before; RuntimeError if their agreements differ.

        Returns in words what was done. Sizes that a rank has measured, though not with all candidates, are settled
        last. The time budget of all ranks begins at their first comparison. Otherwise the budget of a rank that
        measures for a later set of ranks would only begin when those of the sets before have ended.
        """
        key, needs = self._key, [task.need for task in self._tasks]
        agreed = {need: agreement(key, need) for need in needs}
        agreed = {need: before for need, before in agreed.items() if before}
        begun = [need for need in needs if own_measurement(key, need) is not None]
        incomplete = [need for need in begun if not is_complete(own_measurement(key, need))]
        local_statement = TuningStatement(key.device, agreed, all_failed(key), sorted(self._tuner.left()), incomplete)
        device = self._tasks[0].device
        of_all = gathered(local_statement, self._ranks, device, "measurements", self._names)
        statements = dict(zip(self._ranks, of_all))
        self._tuner.begin(device)  # not before slower ranks have come
        self._left = {need for statement in statements.values() for need in statement.left}
        last = {need for statement in statements.values() for need in statement.incomplete}
        self._tasks.sort(key=lambda task: task.need in last)
        for rank, statement in statements.items():
            self._kinds.setdefault(statement.kind, rank)
            # From other kinds of device too, so that all ranks know the same failures.
            record_failures(key, statement.failed)
        for need in needs:
            known = {kind: self._agreed_by(need, kind, statements) for kind in self._kinds}
            self._open[need] = {kind for kind, before in known.items() if before is None}
            if known[key.device] is not None:
                agree(key, need, known[key.device].entry, known[key.device].rank, self._ranks)
        return f"{len(self._ranks)} ranks compare what they know of {len(needs)} products"

    def settle(self, number: int) -> str:
        """Adopt the result for a size, by its number, that one rank of this kind of device knows or measures.

        Returns in words what was done.
        """
        task, waiting = self._tasks[number], len(self._tasks) - 1 - number
        key, need = self._key, task.need
        kinds = self._open[need]
        if not kinds:
            return f"{named(task)}: agreed on before"
        measures = key.device in kinds and self._kinds[key.device] == this_rank()
        answer = self._answer(task, waiting) if measures else None
        of_all = gathered(answer, self._ranks, task.device, "measurements", self._names)
        answers = {rank: other for rank, other in zip(self._ranks, of_all) if other is not None}
        for rank, other in answers.items():
            if other.error:
                raise RuntimeError(f"rank {rank} could not measure {need} for ranks {self._ranks}: {other.error}")
        for other in answers.values():
            record_failures(key, {(need.kernel, need.dtype): other.failed})
        if key.device not in kinds:
            return f"{named(task)}: settled by ranks with other devices"
        rank = self._kinds[key.device]
        choice = answers[rank]
        if choice.entry is not None:
            agree(key, need, choice.entry, rank, self._ranks)
        if not measures:
            self._tuner.findings.append(Finding(task, choice.entry, choice.failed, choice.summary))
        return choice.summary if measures else f"{choice.summary}, by rank {rank}"

    def _answer(self, task: Task, waiting: int) -> Answer:
        """Return what this rank knows of a task, or measures now; an error as text, because other ranks wait."""
        kept = own_measurement(self._key, task.need)
        if is_complete(kept) or (kept is not None and task.need in self._left):
            finding = self._tuner.note(task, kept)
        elif task.need in self._left:
            finding = self._tuner.leave(task)
        else:
            try:
                finding = self._tuner.measure(task, waiting)
            except Exception as error:  # sent to the other ranks, which wait for an answer
                return Answer(None, {}, "", f"{type(error).__name__}: {error}")
        return Answer(finding.entry, finding.failed, finding.summary)

    def _agreed_by(self, need: Need, kind: str, statements: Mapping[int, TuningStatement]) -> Optional[Agreed]:
        """Return the agreement of ranks with this kind of device; RuntimeError if there are different ones."""
        known = {r: s.agreed[need] for r, s in statements.items() if s.kind == kind and need in s.agreed}
        # Other ranks may just have said that it is wrong.
        known = {r: agreed for r, agreed in known.items() if not has_failed(self._key, need, agreed.entry)}
        if not known:
            return None
        first = min(known)
        for rank, agreed in known.items():
            if agreed.entry != known[first].entry:
                raise RuntimeError(
                    f"ranks {self._ranks} cannot agree on {need.m} x {need.k} {need.dtype} {need.kernel}: rank {first} "
                    f"has agreed with {sorted(known[first].sets)} on {known[first].entry}, rank {rank} with "
                    f"{sorted(agreed.sets)} on {agreed.entry}. Let one warmup() come before those of other optimizers, "
                    "of the parameters that most ranks share"
                )
        return known[first]
