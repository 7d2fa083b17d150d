"""Short tensors on a CPU, joined for an operation of torch that waits for all threads at every tensor.

torch's fused AdamW shares a tensor, however short, among all threads, and waits for the last of them. Where other
processes hold the cores, that takes up to a time slice, several milliseconds. ResNet-50 has 107 vectors: beside busy
cores their step takes 871 ms one by one, longer than all products of matrices, and 16 ms joined
(benchmarks/results/step-cpu-2026-11-24-zen4.json and step-cpu-2026-11-28-zen4-resnet-50.json).
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from .fallback import FallbackTensors, columns_of

# Elements of the longest tensor that is joined. torch's simple operations share none that is shorter.
SHORT = 1 << 15
# Elements of the longest vector that tensors are joined to, which bounds the memory of the copies.
JOINED = 1 << 18


def update_joined_(update: Callable[[FallbackTensors], None], tensors: FallbackTensors) -> None:
    """Apply `update` to contiguous tensors; short ones that have counted as many steps are copied into one first.

    `update` changes parameters and averages in place, each element by itself, and so does this.
    """
    if not _waits_at_every_tensor(tensors):
        update(tensors)
        return
    alone, runs = _alone_and_joined(tensors)
    if alone:
        update(columns_of(alone))
    for run in runs:
        kept = columns_of(run)
        flat = [[t.view(-1) for t in column] for column in kept[:4]]
        vectors = list(map(torch.cat, flat))
        update(FallbackTensors(*([vector] for vector in vectors), kept.steps[:1]))
        lengths = list(map(Tensor.numel, kept.parameters))
        for views, vector in zip(flat, vectors):
            if views is not flat[1]:  # gradients
                torch._foreach_copy_(views, vector.split(lengths))


def _alone_and_joined(tensors: FallbackTensors) -> tuple[list[tuple], list[list[tuple]]]:
    """Return the rows of `tensors` that are updated by themselves, and runs of others that are joined.

    Empty tensors are in neither.
    """
    entries, lengths = list(zip(*tensors)), list(map(Tensor.numel, tensors.parameters))
    alone = [entry for entry, length in zip(entries, lengths) if length > SHORT]
    open_runs: dict[float, tuple[list[tuple], int]] = {}
    runs: list[list[tuple]] = []
    for entry, length in zip(entries, lengths):
        if not 0 < length <= SHORT:
            continue
        count = entry[-1].item()
        run, elements = open_runs.get(count, ([], JOINED))
        if elements + length > JOINED:
            run, elements = [], 0
            runs.append(run)
        run.append(entry)
        open_runs[count] = run, elements + length
    return alone + [run[0] for run in runs if len(run) == 1], [run for run in runs if len(run) > 1]


def _waits_at_every_tensor(tensors: FallbackTensors) -> bool:
    """Whether several threads take part. Steps of tensors that are fake or traced cannot be compared."""
    step = tensors.steps[0]
    is_real = type(step) is Tensor and not torch._C._len_torch_dispatch_stack() and not torch.compiler.is_compiling()
    return is_real and step.is_cpu and tensors.parameters[0].is_cpu and torch.get_num_threads() > 1
