"""Reads steps of Muon from traces of torch's profiler: all-to-alls with their times, and products with their FLOPs.

NCCL: a kernel's event says what it moves ("In msg nelems", "dtype", "Group size", "In split size", "Process Group
Ranks"). The profiler copies that from the event `record_param_comms` with the same "External id". One collective may
be several kernels. gloo: an event `c10d::alltoall_base_`, which has shapes if the profiler used
`record_shapes=True`, and for the time an event `gloo:all_to_all` on another thread, in the same order. The ranges
`muon.send` distinguish Muon's all-to-alls from others, and the plan's FLOPs follow the name `muon.orthogonalize`.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STEP = "Optimizer.step#Muon.step"
# The category of what the profiler adds to a trace of a GPU: each range once more, over what it has launched.
ON_GPU = "gpu_user_annotation"
SEND, PRODUCTS = "muon.send", re.compile(r"muon\.orthogonalize (\S+) GFLOP")
# torch's names of a dtype, in NCCL's events and in those of operators.
ITEMSIZES = {
    **dict.fromkeys(("Float", "float"), 4),
    **dict.fromkeys(("Double", "double"), 8),
    **dict.fromkeys(("BFloat16", "c10::BFloat16", "Half", "c10::Half"), 2),
}


class Exchange(NamedTuple):
    """One rank's side of an all-to-all. If the ranks are known, the key is the same on all of them."""

    key: tuple
    sent_bytes: float  # to others
    peers: int
    start: float  # microseconds
    stop: float


class Products(NamedTuple):
    """The work of an owner on one chunk."""

    flop: float  # by the standard iteration
    microseconds: float


class Trace(NamedTuple):
    """The steps of one rank. If there are several, the first is left out, because connections may be made in it."""

    rank: int
    steps: int
    exchanges: list[Exchange]
    products: list[Products]
    unknown: int  # exchanges whose sizes the trace does not have


def read_trace(path: Path) -> Trace:
    """Return Muon's steps in a chrome trace. Raises ValueError if there are none."""
    content = read_timed(path)
    events = sorted(content["traceEvents"], key=lambda e: e["ts"])
    steps = _spans(e for e in events if e["name"] == STEP and e["cat"] != ON_GPU)
    if not steps:
        raise ValueError(f"{path} has no step of Muon")
    counted = steps[1:] or steps
    sends = _Ranges(_spans(e for e in events if e["name"] == SEND and e["cat"] != ON_GPU))
    here = content.get("distributedInfo", {})
    place = here.get("rank", 0), here.get("world_size", 1)
    exchanges = _by_nccl(events, place) if any(map(_is_nccl, events)) else _by_gloo(events, place)
    muons = [(time, exchange) for time, exchange in exchanges if sends.holding(time) is not None]
    inside = list(_in_steps(muons, _Ranges(counted)))
    known = [exchange for exchange in inside if exchange.sent_bytes >= 0]
    return Trace(place[0], len(counted), known, _products(events, counted), len(inside) - len(known))


def read_timed(path: Path) -> dict[str, Any]:
    """Return a chrome trace, which may be compressed, with its timed events alone; ValueError for another file."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    try:
        with opened as file:
            content = json.load(file)
        timed = [e for e in content["traceEvents"] if e.get("ph") == "X" and e.keys() >= {"name", "cat", "ts", "dur"}]
    except (ValueError, LookupError, TypeError, AttributeError, EOFError):
        raise ValueError(f"{path} is no trace: it needs what torch.profiler's export_chrome_trace writes") from None
    return {**content, "traceEvents": timed}


class _Ranges:
    """Spans that do not overlap."""

    def __init__(self, spans: Sequence[tuple[float, float]]):
        self._spans, self._starts = spans, [start for start, _ in spans]

    def holding(self, time: float) -> int | None:
        """Return the number of the span that `time` is in."""
        number = bisect_right(self._starts, time) - 1
        return number if number >= 0 and time <= self._spans[number][1] else None


def _in_steps(exchanges: Iterable[tuple[float, Exchange]], steps: _Ranges) -> Iterator[Exchange]:
    """Yield the exchanges that were started in a step. Their keys say in which one, and their number in their group."""
    counts: defaultdict[tuple, int] = defaultdict(int)
    for time, exchange in exchanges:
        step = steps.holding(time)
        if step is None:
            continue
        group = (*exchange.key, step)
        yield exchange._replace(key=(*group, counts[group]))
        counts[group] += 1


def _products(events: Sequence[dict], steps: Sequence[tuple[float, float]]) -> list[Products]:
    """Return the ranges of the products: the GPU's if there are some, which may end after the step on the host."""
    ranges = [(e, float(m[1]) * 1e9) for e in events if (m := PRODUCTS.fullmatch(e["name"]))]
    device = [pair for pair in ranges if pair[0]["cat"] == ON_GPU]
    begun = steps[0][0]
    return [Products(flop, e["dur"]) for e, flop in device or ranges if flop and e["ts"] >= begun]


def _by_nccl(events: Sequence[dict], place: tuple[int, int]) -> Iterator[tuple[float, Exchange]]:
    """Yield when the host started each all-to-all, and what the kernels' events say about it."""
    kernels: defaultdict[int, list[dict]] = defaultdict(list)
    for event in filter(_is_nccl, events):
        kernels[event["args"]["External id"]].append(event)
    for event in events:
        if event["name"] != "record_param_comms" or event["args"].get("External id") not in kernels:
            continue
        kernel_events = kernels.pop(event["args"]["External id"])
        said, (rank, world) = kernel_events[0]["args"], place
        size, members = said["Group size"], _listed(said.get("Process Group Ranks", ""))
        position = members.index(rank) if rank in members else rank if size == world else None
        sent = _to_others(said["In msg nelems"], _listed(said.get("In split size", "")), position, size)
        key = "nccl", said.get("Process Group Name"), said.get("Process Group Ranks")
        span = min(e["ts"] for e in kernel_events), max(e["ts"] + e["dur"] for e in kernel_events)
        yield event["ts"], Exchange(key, sent[0] * ITEMSIZES[said["dtype"]], sent[1], *span)


def _by_gloo(events: Sequence[dict], place: tuple[int, int]) -> Iterator[tuple[float, Exchange]]:
    """Yield when each all-to-all was started, and what is known about it: -1 bytes if shapes were not recorded."""
    begun = [event for event in events if event["name"] == "c10d::alltoall_base_"]
    done = [event for event in events if event["name"] == "gloo:all_to_all"]
    if len(begun) != len(done):
        raise ValueError(f"the trace begins {len(begun)} all-to-alls of gloo and has {len(done)}")
    rank, world = place
    for event, work in zip(begun, done):
        said, span = event["args"], (work["ts"], work["ts"] + work["dur"])
        if "Input Dims" not in said:
            yield event["ts"], Exchange(("gloo", rank), -1, 0, *span)
            continue
        splits = _listed(said["Concrete Inputs"][4])
        size = len(splits) or world
        # The members are known only for a group of all ranks.
        key, position = (("gloo",), rank) if size == world else (("gloo", rank), None)
        sent = _to_others(said["Input Dims"][1][0], splits, position, size)
        yield event["ts"], Exchange(key, sent[0] * ITEMSIZES[said["Input type"][1]], sent[1], *span)


def _to_others(elements: int, splits: Sequence[int], position: int | None, size: int) -> tuple[float, int]:
    """Return how many elements go to others, and to how many; equal parts if the trace does not list them."""
    if len(splits) != size or position is None:
        return elements * (size - 1) / size, size - 1
    others = [*splits[:position], *splits[position + 1 :]]
    return sum(others), sum(count > 0 for count in others)


def _is_nccl(event: dict) -> bool:
    """Whether it is the kernel of an all-to-all; torch calls one with unequal messages all_to_allv."""
    return event["cat"] == "kernel" and event.get("args", {}).get("Collective name", "").startswith("all_to_all")


def _listed(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in brackets; none if torch has shortened it."""
    return () if "..." in text else tuple(map(int, re.findall(r"\d+", text)))


def _spans(events: Iterable[dict]) -> list[tuple[float, float]]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]
