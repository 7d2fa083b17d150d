"""Where the time of a step goes, by operator, from a file that `torch.profiler` wrote with `export_chrome_trace`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tools.scale.traces import ON_GPU, read_timed

from .theme import BRANCHES, Drawing, grey

MOST = 14
# How torch calls the range around `step` of an optimizer.
STEP = "Optimizer.step#"
# Work on a GPU where there is some, else operators.
KERNELS, OPERATORS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op", "user_annotation")
# The range around `step` on the host. That of its kernels on the GPU is later.
ON_HOST = "user_annotation"


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of operators and kernels in a trace; ValueError for another file."""
    timed = [event for event in read_timed(path)["traceEvents"] if event["cat"] in (*KERNELS, *OPERATORS, ON_GPU)]
    if not timed:
        raise ValueError(f"{path} has no operator or kernel with a duration")
    return timed


def own_times(events: Iterable[dict[str, Any]]) -> Counter[tuple[str, bool]]:
    """Return microseconds by name, and whether inside an optimizer's step, without those of events further inside."""
    events = list(events)
    kinds = KERNELS if any(event["cat"] in KERNELS for event in events) else OPERATORS
    times: Counter[tuple[str, bool]] = Counter()
    ranges = [event for event in events if event["name"].startswith(STEP)]
    on_gpu = [event for event in ranges if event["cat"] == ON_GPU]
    ranges = on_gpu if kinds is KERNELS and on_gpu else [event for event in ranges if event["cat"] == ON_HOST]
    steps = [(event["ts"], event["ts"] + event["dur"]) for event in ranges]
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in (event for event in events if event["cat"] in kinds):
        threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for members in threads.values():
        around: list[tuple[float, tuple[str, bool]]] = []  # the end and the key of events that are open
        for event in sorted(members, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1][0] <= event["ts"]:
                around.pop()
            key = event["name"], any(start <= event["ts"] < end for start, end in steps)
            times[key] += event["dur"]
            if around:
                times[around[-1][1]] -= event["dur"]
            around.append((event["ts"] + event["dur"], key))
    return times


def step_time(events: Iterable[dict[str, Any]]) -> Drawing:
    """Return the drawing of a bar for each of the operators that take longest themselves, and one for all others."""
    times = own_times(events)
    bars = [(_called(name), inside, time) for (name, inside), time in times.most_common(MOST)]
    for inside in (True, False):
        rest = [time for (_, within), time in times.most_common()[MOST:] if within == inside]
        if rest:
            bars.append((f"{len(rest)} others", inside, sum(rest)))
    total = sum(times.values())

    def draw(theme: str) -> Figure:
        figure = Figure(figsize=(7.6, 0.24 * len(bars) + 0.9))
        axes = figure.subplots()
        colours = {True: BRANCHES[theme]["muon"], False: grey(theme)}
        for row, (_, inside, time) in enumerate(bars):
            axes.barh(row, time / 1e3, 0.75, color=colours[inside])
            text = f"{time / 1e3:.3g} ms, {time / total:.0%}"
            axes.annotate(text, (time / 1e3, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), [name if len(name) < 45 else f"{name[:44]}…" for name, _, _ in bars])
        axes.invert_yaxis()
        axes.margins(x=0.16)
        axes.set_xlabel("milliseconds of their own, over the whole trace")
        for height, inside, text in ((0.12, True, "in the optimizer's step"), (0.04, False, "elsewhere")):
            axes.text(0.99, height, text, transform=axes.transAxes, ha="right", color=colours[inside])
        return figure

    return draw


def _called(name: str) -> str:
    """Return what a bar is called: a step's time that no operator has is Python's."""
    return f"Python of {name.removeprefix(STEP)}" if name.startswith(STEP) else name
