"""Constants come back from traces that were made of them; what a trace cannot tell is said.

No trace of NCCL was recorded for this. Its events have the shape that kineto's `ChromeTraceLogger::handleActivity`
writes (pytorch/kineto 002d991, libkineto/src/output_json.cpp): a kernel gets "Collective name", "In msg nelems", "Out
msg nelems", "Group size", "dtype", the splits and the group of the `record_param_comms` with the same "External id";
lists of more than 30 numbers are cut short by "...". Those of gloo have the shape of traces that were recorded.
"""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from tools.scale import calibrate, report
from tools.scale.plans import ASSUMED, Machine
from tools.scale.traces import STEP, read_trace

TRUE = Machine(link_gb_per_s=20.0, microseconds_per_peer=3.0, tflop_per_s=150.0)
ELEMENTS = [2**k for k in range(12, 26, 2)]  # to each rank: 8 KiB to 64 MiB, of two bytes each
GFLOPS = [0.0, 3000.0, 500.0, 40.0]


class Made:
    """Traces of all ranks of a group, with several steps, of which the first is 50 times as slow."""

    def __init__(self, backend: str, ranks: int, noise=lambda: 1.0, shapes: bool = True, steps: int = 3):
        self._backend, self._ranks, self._noise, self._shapes = backend, ranks, noise, shapes
        self._steps, self._ids = steps, itertools.count(1)

    def write(self, folder: Path, elements=ELEMENTS) -> list[Path]:
        paths = []
        times = [[self._noise() * self.microseconds(count) for count in elements] for _ in range(self._steps)]
        for rank in range(self._ranks):
            events, now = [], 1000.0
            for step, durations in enumerate(times):
                slow = 50 if step == 0 and self._steps > 1 else 1
                begun = now
                # A rank that comes sooner waits; each exchange has another one that comes last.
                for number, (count, time) in enumerate(zip(elements, durations)):
                    early = 0 if number % self._ranks == rank else 500.0 * (rank + 1)
                    events += self._exchange(now, count, slow * time + early, rank)
                    now += slow * time + 2000
                for gflop in GFLOPS:
                    length = slow * self._noise() * gflop / TRUE.tflop_per_s * 1e3
                    events += self._products(now, length, gflop)
                    now += length + 10
                events.append(event(STEP, "user_annotation", begun - 1, now - begun))
                now += 100
            # Others' collectives, and those of other purposes, are not Muon's.
            events += self._exchange(now, 7, 1e6, rank)[1:]
            events.append({"ph": "i", "name": "Iteration Start", "ts": 0.0})
            content = {"distributedInfo": {"rank": rank, "world_size": self._ranks}, "traceEvents": events}
            paths.append(folder / f"trace.{rank}.json")
            paths[-1].write_text(json.dumps(content))
        return paths

    def microseconds(self, count: int) -> float:
        peers = self._ranks - 1
        return 2 * count * peers / (1e3 * TRUE.link_gb_per_s) + peers * TRUE.microseconds_per_peer

    def _exchange(self, now: float, count: int, length: float, rank: int) -> list[dict]:
        total, splits = count * self._ranks, [count] * self._ranks
        send = event("muon.send", "user_annotation", now, 5)
        if self._backend == "gloo":
            shapes = {
                "Input Dims": [[total], [total], [], [], [], [], []],
                "Input type": ["c10::BFloat16", "c10::BFloat16", "", "ScalarList", "ScalarList", "Scalar", "Scalar"],
                "Concrete Inputs": ["", "", "", str(splits), str(splits), "True", "-1"],
            }
            begun = event("c10d::alltoall_base_", "cpu_op", now + 1, 3, **shapes if self._shapes else {})
            return [send, begun, event("gloo:all_to_all", "user_annotation", now + 2, length)]
        said = {
            "Collective name": "all_to_allv",
            "In msg nelems": total,
            "Out msg nelems": total,
            "Group size": self._ranks,
            "dtype": "BFloat16",
            "In split size": listed(splits),
            "Out split size": listed(splits),
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": listed(range(self._ranks)),
            "External id": next(self._ids),
        }
        # Behind other work of the stream, and in two kernels, as NCCL may cut a large one.
        late, kernel = now + 300, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        return [
            send,
            event("record_param_comms", "cpu_op", now + 1, 3, **said),
            event(kernel, "kernel", late, length / 2, **said),
            event(kernel, "kernel", late + length / 2, length / 2, **said),
        ]

    def _products(self, now: float, length: float, gflop: float) -> list[dict]:
        name = f"muon.orthogonalize {gflop:.6g} GFLOP"
        if self._backend == "gloo":
            return [event(name, "user_annotation", now, length)]
        return [event(name, "user_annotation", now, 8), event(name, "gpu_user_annotation", now, length)]


def event(name: str, category: str, start: float, length: float, **arguments) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": arguments}


def listed(numbers) -> str:
    numbers = list(numbers)
    return str(numbers) if len(numbers) <= 30 else f"[{', '.join(map(str, numbers[:29]))}, ..., {numbers[-1]}]"


def fitted(paths: list[Path]) -> calibrate.Fit:
    return calibrate.calibrate([read_trace(path) for path in paths])


@pytest.mark.parametrize("backend, ranks", [("nccl", 4), ("nccl", 64), ("gloo", 4)])
def test_exact_times_give_the_constants_back(tmp_path, backend, ranks):
    fit = fitted(Made(backend, ranks).write(tmp_path))
    # 6 digits are what the name of a range has of its FLOPs.
    assert fit.constants == pytest.approx(vars(TRUE), rel=1e-6)
    assert not fit.untold
    assert fit.lines[0] == f"{ranks} ranks, 2 steps"
    assert fit.lines[1].startswith(f"{2 * len(ELEMENTS)} all-to-alls")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_noise_of_the_times_bounds_the_errors_of_the_constants(tmp_path, backend):
    """Times are off by a share of at most e.

    With rows (bytes, peers) / time, scaled so that the true solution is (1, 1), x - x0 is the pseudo-inverse times the
    errors: at most sqrt(n) e / s, where s is the smallest singular value. The rows are divided by what was fitted
    instead, which lies within that share of the true time, whence (1 + e') / (1 - e'); and 1 / x is as far off.
    """
    e, ranks, steps = 0.02, 4, 6
    random = np.random.default_rng(0)
    made = Made(backend, ranks, lambda: random.uniform(1 - e, 1 + e), steps=steps)
    fit = fitted(made.write(tmp_path))
    sent = np.array([2 * count * (ranks - 1) / (1e3 * TRUE.link_gb_per_s) for count in ELEMENTS] * (steps - 1))
    latency = np.full(len(sent), (ranks - 1) * TRUE.microseconds_per_peer)
    rows = np.stack([sent, latency], axis=1) / (sent + latency)[:, None]
    off = np.sqrt(len(sent)) * e / np.linalg.svd(rows, compute_uv=False)[-1]
    off *= (1 + off) / (1 - off)
    off /= 1 - off
    assert off < 0.1
    assert fit.constants["link_gb_per_s"] == pytest.approx(TRUE.link_gb_per_s, rel=off)
    assert fit.constants["microseconds_per_peer"] == pytest.approx(TRUE.microseconds_per_peer, rel=off)
    assert fit.constants["tflop_per_s"] == pytest.approx(TRUE.tflop_per_s, rel=e / (1 - e))
    # A fit by least squares is no further from the times than the truth is.
    assert "the fit is off by 1%" in fit.lines[1] or "the fit is off by 2%" in fit.lines[1]


def test_messages_of_one_size_do_not_tell_rate_from_latency(tmp_path):
    made = Made("nccl", 4)
    fit = fitted(made.write(tmp_path, [2**20]))
    assert "microseconds_per_peer" not in fit.constants
    assert "rate from latency" in fit.untold[0]
    alone = made.microseconds(2**20) - 3 * ASSUMED.microseconds_per_peer
    assert fit.constants["link_gb_per_s"] == pytest.approx(2e-3 * 2**20 * 3 / alone)


def test_gloo_without_shapes_is_said_to_have_no_bytes(tmp_path):
    fit = fitted(Made("gloo", 2, shapes=False).write(tmp_path))
    assert list(fit.constants) == ["tflop_per_s"]
    assert any("record_shapes=True" in line for line in fit.untold)


def test_one_rank_cannot_tell_waiting_from_sending(tmp_path):
    paths = Made("nccl", 4).write(tmp_path)
    fit = fitted(paths[:1])
    assert any("waiting for other ranks" in line for line in fit.untold)
    assert fit.constants["microseconds_per_peer"] > 10 * TRUE.microseconds_per_peer


def test_a_single_traced_step_counts(tmp_path):
    fit = fitted(Made("nccl", 4, steps=1).write(tmp_path))
    assert fit.constants["link_gb_per_s"] == pytest.approx(TRUE.link_gb_per_s)


def test_a_trace_without_muon_raises(tmp_path):
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [event("aten::mm", "cpu_op", 0.0, 1.0)]}, file)
    with pytest.raises(ValueError, match="no step of Muon"):
        read_trace(path)


def test_report_assumes_what_was_calibrated(tmp_path, capsys):
    paths = Made("nccl", 4).write(tmp_path, [2**20])
    calibrate.main([*map(str, paths), "--output", str(tmp_path / "machine.json")])
    assert "TFLOP/s of the products" in capsys.readouterr().out
    machine = report.machine_of(tmp_path / "machine.json", ASSUMED)
    assert machine.tflop_per_s == pytest.approx(TRUE.tflop_per_s)
    assert machine.microseconds_per_peer == ASSUMED.microseconds_per_peer  # which was not told
    assert report.machine_of(None, ASSUMED) == ASSUMED
