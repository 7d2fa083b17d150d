"""Timing of configurations against each other: all a few times, the best many times, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.timing import replayed, take_turns
from tests.support.proofs import race as turns
from tools.lab.candidates import Launch
from tools.lab.items import FailedError, loses_gpu

FINALISTS = 4
FIRST_ROUNDS, FINAL_ROUNDS, TINY_ROUNDS = 7, 31, 2

# Calls of a launch, each on operands of its own, which together do not fit into the cache.
Calls = Callable[[Launch], Sequence[Callable[[], object]]]


# What is wrong with what a launch computes, nothing where it is right.
Proof = Callable[[Launch], str]


@dataclass
class Timed:
    """A launch and what one call of it takes."""

    launch: Launch
    seconds: float
    spread: float


@dataclass
class Found:
    """The winner and the best of the others, how many could be launched, and which of the fastest were wrong."""

    winner: Timed
    second: Timed
    count: int
    wrong: dict[str, str]


def find_fastest(launches: list[Launch], before: Launch, calls: Calls, proof: Proof, tiny: bool) -> Found:
    """Return the winner of those that are right; `before` was chosen until now."""
    first = race(list(dict.fromkeys([before, *launches])), calls, TINY_ROUNDS if tiny else FIRST_ROUNDS)
    best, wrong = [], {}
    for launch in dict.fromkeys([before, *(t.launch for t in sorted(first, key=lambda timed: timed.seconds))]):
        if len(best) <= FINALISTS and any(timed.launch == launch for timed in first):
            problem = proof(launch)
            wrong |= {launch.key: problem} if problem else {}
            best += [] if problem else [launch]
    if not best:
        raise FailedError(f"no candidate is right: {wrong}")
    return Found(*decide(race(best, calls, TINY_ROUNDS if tiny else FINAL_ROUNDS), before), len(first), wrong)


def race(launches: list[Launch], calls: Calls, rounds: int) -> list[Timed]:
    """Time each launch, in turns; those that cannot be started are left out."""
    works, started = [], []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for launch in launches:
        made = calls(launch)
        try:
            works.append(replayed(made, device))
            started.append((launch, len(made)))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # Triton raises errors of any class, as for too much shared memory
            if loses_gpu(error):
                raise
            print(f"{launch.key} is left out: {type(error).__name__}: {str(error)[:200]}")
    if not started:
        raise FailedError("no candidate can be launched")
    times = take_turns(works, device, rounds)
    return [Timed(launch, seconds / count, spread) for (launch, count), (seconds, spread) in zip(started, times)]


def decide(final: list[Timed], before: Launch) -> tuple[Timed, Timed]:
    """Return the winner and the best of the others; what was chosen `before` wins unless it is slower beyond noise."""
    ranked = sorted(final, key=lambda timed: timed.seconds)
    by_launch = {timed.launch: timed for timed in ranked}
    times = {launch: turns.Timed(timed.seconds, timed.spread) for launch, timed in by_launch.items()}
    winner = by_launch[turns.decide(times, before)]
    others = [timed for timed in ranked if timed is not winner]
    return winner, (others or [winner])[0]
