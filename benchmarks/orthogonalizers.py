"""The contestants of `sweep_orthogonalize.py`: each turns float32 matrices into factors in its own work dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from benchmarks.peers import OURS, MissingError, load_peer
from benchmarks.result_file import NEEDS_GPU
from benchmarks.timing import replayed

EPS = 1e-7
STEPS = 5
JORDAN = ((3.4445, -4.7750, 2.0315),) * STEPS

REPLAYED = "optimizer, replayed"
OWN = (OURS, REPLAYED)
TORCH_PRODUCTS = "torch products"
COMPILED = "torch.compile"
TORCH_MUON = "torch.optim.Muon"
TIMM = "timm"
PYTORCH_OPTIMIZER = "pytorch-optimizer"
GRAM_NEWTON_SCHULZ = "gram-newton-schulz"
GRAM_OVER_TORCH = "gram-newton-schulz over torch"
FLASH_MUON = "flash-muon"
DION = "dion"


class Contestant(NamedTuple):
    """`run` turns G (B, rows, cols) into B factors; `schedule` is the polynomial that it should compute."""

    run: Callable[[Tensor], Sequence[Tensor]]
    schedule: Sequence[tuple[float, float, float]]


class Task(NamedTuple):
    """What all contestants get: matrices of one size, and the iteration that the kernel has chosen for it."""

    kernel: ModuleType
    device: torch.device
    iteration: tuple
    schedule: tuple
    compile_mode: str

    @property
    def over_torch(self):
        """The same iteration, standard and over torch's own products."""
        tables = self.kernel.kernels.products
        products = tables.SINGLE if self.device.type == "cpu" else tables.BATCHED
        scaled = self.kernel.schedules.with_folded_scale(self.schedule, self.iteration.scale)
        return self.iteration._replace(method="standard", windows=(scaled,), products=products, in_one_launch=False)


def find_contestant(name: str, task: Task) -> Contestant:
    """Return the contestant called `name`; `MissingError`, with its mark, if it cannot take part."""
    return _FINDERS[name](task)


def _ours(task: Task) -> Contestant:
    return Contestant(lambda G: task.kernel.polar.factors.polar_factors(G, task.iteration, EPS), task.schedule)


def _replayed(task: Task) -> Contestant:
    """Ours as a CUDA graph, which is what steps replay after a warm-up; each G is captured in its place."""
    if not task.kernel.step.graphs.can_capture(task.device):
        raise MissingError(NEEDS_GPU)
    ours = _ours(task)

    @cache  # by the tensor itself, which the cache keeps where it is
    def captured(G: Tensor) -> tuple[Callable[[], object], list[Tensor]]:
        factors: list[Tensor] = []

        def compute() -> None:
            factors[:] = [ours.run(G)]

        return replayed([compute], task.device), factors

    def run(G: Tensor) -> Tensor:
        start, factors = captured(G)
        start()
        return factors[0]

    return ours._replace(run=run)


def _torch_products(task: Task) -> Contestant:
    iteration = task.over_torch
    return Contestant(lambda G: task.kernel.polar.factors.polar_factors(G, iteration, EPS), task.schedule)


def _compiled(task: Task) -> Contestant:
    iteration = task.over_torch
    compiled = torch.compile(
        lambda G: task.kernel.polar.factors.polar_factors(G, iteration, EPS), dynamic=False, mode=task.compile_mode
    )
    if task.device.type == "cuda":
        return Contestant(compiled, task.schedule)
    # On a CPU one matrix at a time: torch.compile would unroll a batch into as many copies of the program.
    return Contestant(lambda G: [compiled(g[None])[0] for g in G], task.schedule)


def _torch_muon(task: Task) -> Contestant:
    return Contestant(lambda G: [_zeropower_via_newtonschulz(g, JORDAN[0], STEPS, EPS) for g in G], JORDAN)


def _timm(task: Task) -> Contestant:
    peer = load_peer(TIMM)
    schedule = list(task.kernel.schedules.resolve_schedule("quintic", STEPS))
    return Contestant(lambda G: peer.zeropower_via_newtonschulz(G, STEPS, schedule, EPS), schedule)


def _pytorch_optimizer(task: Task) -> Contestant:
    load_peer(PYTORCH_OPTIMIZER)
    from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5

    return Contestant(lambda G: zero_power_via_newton_schulz_5(G, STEPS), JORDAN)


def _gram_newton_schulz(task: Task, kernels: bool = True) -> Contestant:
    peer = _on_a_gpu(GRAM_NEWTON_SCHULZ, task)
    run = peer.GramNewtonSchulz(ns_use_kernels=kernels)
    return Contestant(run, tuple(map(tuple, peer.POLAR_EXPRESS_COEFFICIENTS)))


def _flash_muon(task: Task) -> Contestant:
    peer = _on_a_gpu(FLASH_MUON, task)
    return Contestant(lambda G: [peer.fast_newtonschulz(g, STEPS) for g in G], JORDAN)  # one matrix at a time


def _dion(task: Task) -> Contestant:
    peer = _on_a_gpu(DION, task)
    # Its coefficients are inside the function and equal the preset's.
    schedule = task.kernel.schedules.resolve_schedule("quintic", STEPS)
    return Contestant(lambda G: peer.newton_schulz_triton(G, EPS), schedule)


def _on_a_gpu(name: str, task: Task) -> ModuleType:
    peer = load_peer(name)
    if task.device.type == "cpu":
        raise MissingError(NEEDS_GPU)
    return peer


_FINDERS = {
    OURS: _ours,
    REPLAYED: _replayed,
    TORCH_PRODUCTS: _torch_products,
    COMPILED: _compiled,
    TORCH_MUON: _torch_muon,
    TIMM: _timm,
    PYTORCH_OPTIMIZER: _pytorch_optimizer,
    GRAM_NEWTON_SCHULZ: _gram_newton_schulz,
    GRAM_OVER_TORCH: partial(_gram_newton_schulz, kernels=False),  # without quack, which needs a recent GPU
    FLASH_MUON: _flash_muon,
    DION: _dion,
}
NAMES = tuple(_FINDERS)
PEERS = tuple(name for name in NAMES if name not in OWN)
