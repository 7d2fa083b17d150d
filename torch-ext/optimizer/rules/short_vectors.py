"""Tensors on a CPU as torch's fused AdamW should get them: in whole vectors, short ones joined.

The kernel rounds the elements after the last whole vector of a tensor differently, so their bits would depend on how a
parameter is sharded. Zeros behind them make them a whole vector.

It shares a tensor, however short, among all threads, and waits for the last of them. Where other processes hold the
cores, that takes up to a time slice, several milliseconds. ResNet-50 has 107 vectors: beside busy cores their step
takes 871 ms one by one, longer than all products of matrices, and 16 ms joined
(benchmarks/results/step-cpu-2026-11-24-zen4.json and step-cpu-2026-11-28-zen4-resnet-50.json).
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from .fallback import FallbackTensors, columns_of, runs_of

# Elements of the longest vector that the kernel uses: 64 bytes of half precision.
VECTOR = 32
# Elements of the longest tensor that is joined. torch's simple operations share none that is shorter.
SHORT = 1 << 15
# Elements of the longest vector that tensors are joined to, which bounds the memory of the copies.
JOINED = 1 << 18


def update_joined_(update: Callable[[FallbackTensors], None], tensors: FallbackTensors) -> None:
    """Apply `update` to contiguous tensors: on a CPU to whole vectors, for which short tensors and ends are copied.

    `update` changes parameters and averages in place, each element by itself, and so does this. Of 100,005 elements the
    first 100,000 are used in place, the last 5 in a copy. One vector has copies of tensors that have counted as many
    steps.
    """
    if not tensors.parameters[0].is_cpu:
        update(tensors)
        return
    can_compare = _can_compare(tensors.steps[0])
    alone, short = _alone_and_short(tensors, can_compare and torch.get_num_threads() > 1)
    if alone:
        update(columns_of(alone))
    by_count: dict[float, list[tuple]] = {}
    for number, row in enumerate(short):
        by_count.setdefault(row[-1].item() if can_compare else number, []).append(row)
    for rows in by_count.values():
        for run in runs_of(rows, JOINED):
            _update_run_(update, columns_of(run))


def _update_run_(update: Callable[[FallbackTensors], None], tensors: FallbackTensors) -> None:
    """Apply `update` to copies of the tensors in one vector each, with zeros up to a whole vector of the kernel."""
    flat = [[t.view(-1) for t in column] for column in tensors[:4]]
    lengths = list(map(Tensor.numel, tensors.parameters))
    lengths.append(-sum(lengths) % VECTOR)
    vectors = [torch.cat([*views, views[0].new_zeros(lengths[-1])]) for views in flat]
    update(FallbackTensors(*([vector] for vector in vectors), tensors.steps[:1]))
    for views, vector in zip(flat, vectors):
        if views is not flat[1]:  # gradients
            torch._foreach_copy_(views, vector.split(lengths)[:-1])


def _alone_and_short(tensors: FallbackTensors, join: bool) -> tuple[list[tuple], list[tuple]]:
    """Return rows of `tensors` that are updated by themselves, and rows that are copied. Empty tensors are in neither.

    Copied are short tensors, unless they are whole vectors and not to `join`, and the ends of longer ones.
    """
    alone, short = [], []
    for row in zip(*tensors):
        length = row[0].numel()
        rest = length % VECTOR
        if length > SHORT and rest:
            *elements, step = row
            whole, end = zip(*(t.view(-1).split((length - rest, rest)) for t in elements))
            alone.append((*whole, step))
            short.append((*end, step))
        elif rest or (join and 0 < length <= SHORT):
            short.append(row)
        elif length:
            alone.append(row)
    return alone, short


def _can_compare(step: Tensor) -> bool:
    """Whether counts of steps are known on the host: those of tensors that are fake or traced are not."""
    is_real = type(step) is Tensor and not torch._C._len_torch_dispatch_stack() and not torch.compiler.is_compiling()
    return is_real and step.is_cpu
