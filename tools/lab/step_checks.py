"""Laws of whole steps of Muon on the device: exchanged, scaled and captured; each check returns what is wrong."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tools.lab.items import Lab, NotApplicableError
from tools.lab.optimizer_checks import shapes
from tools.lab.product_checks import Draw, said

STEPS = 3
LR = 0.02
SCALE = 1024.0  # a power of two: dividing by it is exact

Parameters = dict[str, nn.Parameter]
Gradients = dict[str, Tensor]


def drawn(lab: Lab, draw: Draw) -> Gradients:
    """Return values for a vector and for matrices of several shapes, each of which is a batch by itself."""
    found = {f"{name}.weight": draw.normal(*shape[1:]) for name, shape in shapes(lab).items()}
    return {**found, "norm.weight": draw.normal(100)}


def copied(values: Gradients) -> Parameters:
    return {name: nn.Parameter(value.clone()) for name, value in values.items()}


def muon(lab: Lab, parameters: Parameters, dtype: torch.dtype, **settings) -> Optimizer:
    return lab.kernel.Muon(parameters.items(), **{"lr": LR, "ns_dtype": dtype, **settings})


def take_step(optimizer: Optimizer, parameters: Parameters, gradients: Gradients) -> None:
    for name, p in parameters.items():
        p.grad = gradients[name].clone()
    optimizer.step()


def differing(found: Parameters, expected: Parameters) -> list[str]:
    return [f"{name} has other bits" for name, p in found.items() if not torch.equal(p, expected[name])]


def check_exchange(lab: Lab, dtype: torch.dtype) -> list[str]:
    """Steps whose matrices go through the exchanges of a group of one rank give the bits of steps without a group."""
    draw = Draw(lab.device)
    start, gradients = drawn(lab, draw), [drawn(lab, draw) for _ in range(STEPS)]
    alone, shared = copied(start), copied(start)
    without = muon(lab, alone, dtype)
    plan = lab.kernel.distributed.exchange_plan
    # A rank that is alone would send nothing, and matrices of one chunk each show that chunks overtake each other.
    with (
        group_of_one(lab) as group,
        mock.patch.object(plan, "is_exchanged", lambda shards, index: True),
        mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent,
    ):
        within = muon(lab, shared, dtype, process_group=group, chunk_bytes=1)
        for each in gradients:
            take_step(without, alone, each)
            take_step(within, shared, each)
    matrices = sum(p.ndim == 2 for p in shared.values())
    problems = differing(shared, alone)
    if sent.call_count != 2 * matrices * STEPS:
        problems.append(f"{sent.call_count} messages where {matrices} matrices need 2 each in {STEPS} steps")
    return said(problems, draw)


@contextlib.contextmanager
def group_of_one(lab: Lab) -> Iterator[dist.ProcessGroup]:
    """Make this process the only rank of a group on the device."""
    backend = "nccl" if lab.device.type == "cuda" else "gloo"
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise NotApplicableError(f"this torch has no {backend}")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()


def check_scaler(lab: Lab, dtype: torch.dtype) -> list[str]:
    """Under a GradScaler steps give the bits of unscaled gradients, and one with an infinite gradient moves nothing."""
    draw = Draw(lab.device)
    start, gradients = drawn(lab, draw), [drawn(lab, draw) for _ in range(STEPS)]
    plain, scaled = copied(start), copied(start)
    without, within = muon(lab, plain, dtype), muon(lab, scaled, dtype)
    scaler = torch.amp.GradScaler(lab.device.type, init_scale=SCALE, growth_interval=10**6)
    scaler.scale(torch.ones((), device=lab.device))  # which makes its tensors
    for each in gradients:
        take_step(without, plain, each)
        for name, p in scaled.items():
            p.grad = SCALE * each[name]
        scaler.step(within)
        scaler.update()
    problems = differing(scaled, plain)
    scaled["norm.weight"].grad[0] = torch.inf
    scaler.step(within)
    scaler.update()
    problems += [f"{problem} after an overflow" for problem in differing(scaled, plain)]
    if scaler.get_scale() != SCALE / 2:
        problems.append(f"the scale after an overflow is {scaler.get_scale()}")
    return said(problems, draw)


def check_captured_step(lab: Lab, dtype: torch.dtype) -> list[str]:
    """A captured step, replayed on new gradients and another lr, gives the bits of eager steps."""
    if lab.device.type != "cuda":
        raise NotApplicableError("graphs are captured on GPUs alone")
    draw = Draw(lab.device)
    start, gradients = drawn(lab, draw), [drawn(lab, draw) for _ in range(STEPS + 1)]
    rates = [torch.tensor(LR, device=lab.device) for _ in range(2)]
    eager, replayed = copied(start), copied(start)
    optimizers = [muon(lab, p, dtype, lr=lr, capturable=True) for p, lr in zip((eager, replayed), rates)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and makes what libraries keep, outside of the capture
        for optimizer, parameters in zip(optimizers, (eager, replayed)):
            take_step(optimizer, parameters, gradients[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()
    for number, each in enumerate(gradients[1:], 1):
        for lr in rates:
            lr.fill_(LR / number)
        take_step(optimizers[0], eager, each)
        for name, p in replayed.items():
            p.grad.copy_(each[name])
        graph.replay()
    return said(differing(replayed, eager), draw)
