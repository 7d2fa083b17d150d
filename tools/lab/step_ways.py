"""The same step launched in different ways: kernel by kernel, as a CUDA graph, and compiled.

Beside the replayed step, in which the host has no part, is what the model of products predicts for it with each kind of
product (`benchmarks.predicted_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch.optim import _muon

from benchmarks.fake_gpu import GPU
from benchmarks.predicted_step import PREDICTED, predicted_step
from benchmarks.shapes import MODELS, TINY_MODEL, Parameter
from benchmarks.step_rivals import MOMENTUM, SCALARS, find_rival, make_weights, step_of
from benchmarks.timing import replayed, take_turns
from tools.lab.items import Lab

TORCH_MUON, ADAMW = "torch.optim.Muon", "AdamW"
REPLAYED = "optimizer, replayed"


def compare_ways(lab: Lab, model: str) -> dict:
    """Return a row for each way to take a step over a model's parameters: milliseconds, their spread, predictions."""
    parameters = TINY_MODEL if lab.tiny else MODELS[model]
    works = ways(lab, parameters)
    for work in works.values():
        work()  # makes state and compiles
    times = take_turns(list(works.values()), lab.device, lab.rounds)
    predicted = predicted_times(lab, parameters)
    rows = [
        {"step of": name, "milliseconds": 1e3 * seconds, "spread": spread, **dict.fromkeys(predicted)}
        for name, (seconds, spread) in zip(works, times)
    ]
    next(row for row in rows if row["step of"] == REPLAYED).update(predicted)
    return {"results": rows}


def predicted_times(lab: Lab, parameters: Sequence[Parameter]) -> dict[str, float | None]:
    """Return the predicted milliseconds of a step by heading; each is None on GPUs that differ from the model's."""
    gpu = lab.kernel.kernels.machine.gpu_of(lab.device)
    is_modelled = gpu is not None and (gpu.capability, gpu.multiprocessors) == GPU[:2]
    return {
        f"predicted milliseconds, {way}": 1e3 * predicted_step(lab.kernel, parameters, way) if is_modelled else None
        for way in PREDICTED
    }


def ways(lab: Lab, parameters: Sequence[Parameter]) -> dict[str, Callable[[], object]]:
    """Return the steps by name, each with its own parameters. Without a GPU there is no graph to replay."""
    compiled = torch.compile(_muon._zeropower_via_newtonschulz, backend="eager" if lab.tiny else "inductor")
    torchs = rival_step(lab, TORCH_MUON, parameters)

    def compiled_torchs() -> None:
        with mock.patch.object(_muon, "_zeropower_via_newtonschulz", compiled):
            torchs()

    return {
        "optimizer": our_step(lab, parameters),
        REPLAYED: replayed([our_step(lab, parameters)], lab.device),
        TORCH_MUON: torchs,
        f"{TORCH_MUON}, its iteration compiled": compiled_torchs,
        f"{ADAMW}, fused": rival_step(lab, ADAMW, parameters),
    }


def our_step(lab: Lab, parameters: Sequence[Parameter]) -> Callable[[], None]:
    """Return a step of our optimizer that may be captured."""
    weights = make_weights(parameters, lab.device)
    groups = [{"params": weights.matrices, "use_muon": True}, {"params": weights.rest, "use_muon": False}]
    return lab.kernel.Muon(groups, momentum=MOMENTUM, capturable=True, **SCALARS).step


def rival_step(lab: Lab, name: str, parameters: Sequence[Parameter]) -> Callable[[], None]:
    return step_of(find_rival(name, lab.kernel, lab.device).build(make_weights(parameters, lab.device)))
