"""The same step launched in different ways: kernel by kernel, as a CUDA graph, and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch.optim import _muon

from benchmarks.shapes import MODELS, TINY_MODEL, Parameter
from benchmarks.step_rivals import MOMENTUM, SCALARS, find_rival, make_weights, step_of
from benchmarks.timing import replayed, take_turns
from tools.lab.items import Lab

TORCH_MUON, ADAMW = "torch.optim.Muon", "AdamW"


def compare_ways(lab: Lab, model: str) -> dict:
    """Return a row for each way to take a step over a model's parameters: milliseconds and their spread."""
    works = ways(lab, TINY_MODEL if lab.tiny else MODELS[model])
    for work in works.values():
        work()  # makes state and compiles
    times = take_turns(list(works.values()), lab.device, lab.rounds)
    rows = [
        {"step of": name, "milliseconds": 1e3 * seconds, "spread": spread}
        for name, (seconds, spread) in zip(works, times)
    ]
    return {"results": rows}


def ways(lab: Lab, parameters: Sequence[Parameter]) -> dict[str, Callable[[], object]]:
    """Return the steps by name, each with its own parameters. Without a GPU there is no graph to replay."""
    compiled = torch.compile(_muon._zeropower_via_newtonschulz, backend="eager" if lab.tiny else "inductor")
    torchs = rival_step(lab, TORCH_MUON, parameters)

    def compiled_torchs() -> None:
        with mock.patch.object(_muon, "_zeropower_via_newtonschulz", compiled):
            torchs()

    return {
        "optimizer": our_step(lab, parameters),
        "optimizer, replayed": replayed([our_step(lab, parameters)], lab.device),
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
