"""The contestants of `sweep_step.py`: optimizers over the same matrices and the same other parameters.

All use the same momentum, Nesterov, learning rate and weight decay, and AdamW for everything that is not a matrix. Each
has its own coefficients, as its users have them. Convolutions are flattened, since `torch.optim.Muon` takes two
dimensions.

Ours is there twice: as it is made, and after `warmup`, whose CUDA graphs its steps replay. On a CPU there are none, and
the second one is marked. This warm-up measures nothing, because what it found would change the kernels of both in the
middle of a sweep. So both use the kernels that `tune` has measured before, or else those that the package ships or
predicts, and differ in how these are launched. The lab tunes before it measures.

flash-muon is only in `sweep_orthogonalize.py`, since its optimizer needs a process group. Keller Jordan's writes into
the gradients, which all contestants of `sweep_step.py` share: values change from round to round, the work does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from benchmarks.orthogonalizers import JORDAN, STEPS
from benchmarks.peers import OURS, MissingError, load_peer
from benchmarks.result_file import NEEDS_GPU
from benchmarks.shapes import Parameter

LR, WEIGHT_DECAY, MOMENTUM, BETAS = 1e-3, 0.1, 0.95, (0.9, 0.95)
SCALARS = {"lr": LR, "weight_decay": WEIGHT_DECAY}
SETTINGS = {**SCALARS, "momentum": MOMENTUM, "nesterov": True, "betas": BETAS, "dtype": "float32"}

WARMED_UP = "optimizer, warmed up"
OWN = (OURS, WARMED_UP)
ADAMW = "AdamW"


class Weights(NamedTuple):
    """The parameters of a model, with gradients."""

    matrices: list[Tensor]
    rest: list[Tensor]


class Rival(NamedTuple):
    """`build` makes the optimizers for some weights; an update is lr * multiplier(rows, cols) * polynomial.

    `schedule` None means that matrices are not orthogonalized.
    """

    build: Callable[[Weights], list[Optimizer]]
    multiplier: Callable[[int, int], float] | None = None
    schedule: Sequence[tuple[float, float, float]] | None = None


def match_rms(rows: int, cols: int) -> float:
    return 0.2 * math.sqrt(max(rows, cols))


def spectral(rows: int, cols: int) -> float:
    return math.sqrt(max(1.0, rows / cols))


def make_weights(parameters: Sequence[Parameter], device: torch.device) -> Weights:
    """Return new float32 parameters with gradients, the same at every call; matrices are (rows, cols)."""
    generator = torch.Generator(device).manual_seed(0)
    weights = Weights([], [])
    for parameter in parameters:
        shape = parameter.rows_and_columns if parameter.matrix else parameter.shape
        p = torch.zeros(shape, device=device, requires_grad=True)
        p.grad = torch.randn(shape, generator=generator, device=device)
        (weights.matrices if parameter.matrix else weights.rest).append(p)
    return weights


def step_of(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Return one call that steps all of `optimizers`."""

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def find_rival(name: str, kernel: ModuleType, device: torch.device) -> Rival:
    """Return the contestant called `name`; `MissingError`, with its mark, if it cannot take part."""
    return _FINDERS[name](kernel, device)


def build_ours(kernel: ModuleType, weights: Weights, **settings: Any) -> list[Optimizer]:
    """Return our optimizer over `weights`, which may lack matrices or other parameters."""
    groups = [{"params": weights.matrices, "use_muon": True}, {"params": weights.rest, "use_muon": False}]
    return [kernel.Muon([group for group in groups if group["params"]], momentum=MOMENTUM, **SCALARS, **settings)]


def build_warmed_up(kernel: ModuleType, weights: Weights) -> list[Optimizer]:
    """Return our optimizer after a warm-up. RuntimeError if some batches do not replay a graph."""
    (optimizer,) = build_ours(kernel, weights)
    optimizer.warmup(lambda *_: None, budget=0)
    said = next(note for note in optimizer.explain().notes if "replay a CUDA graph" in note)
    replayed, _, batches, *_ = said.split()
    if replayed != batches:
        raise RuntimeError(said)
    return [optimizer]


def _ours(kernel: ModuleType, _: torch.device) -> Rival:
    schedule = kernel.schedules.resolve_schedule("polar_express", STEPS)
    return Rival(lambda weights: build_ours(kernel, weights), match_rms, schedule)


def _warmed_up(kernel: ModuleType, device: torch.device) -> Rival:
    if not kernel.step.graphs.can_capture(device):
        raise MissingError(NEEDS_GPU)
    return _ours(kernel, device)._replace(build=partial(build_warmed_up, kernel))


def _torch_muon(kernel: ModuleType, _: torch.device) -> Rival:
    def build(weights: Weights) -> list[Optimizer]:
        muon = torch.optim.Muon(weights.matrices, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw", **SCALARS)
        return [muon, AdamW(weights.rest, betas=BETAS, fused=True, **SCALARS)]

    return Rival(build, match_rms, JORDAN)


def _timm(kernel: ModuleType, _: torch.device) -> Rival:
    peer = load_peer("timm")

    def build(weights: Weights) -> list[Optimizer]:
        # With nesterov its AdamW would become NAdamW.
        rest = {"params": weights.rest, "use_fallback": True, "nesterov": False}
        return [peer.Muon([{"params": weights.matrices}, rest], momentum=MOMENTUM, nesterov=True, **SCALARS)]

    return Rival(build, match_rms, kernel.schedules.resolve_schedule("quintic", STEPS))


def _pytorch_optimizer(kernel: ModuleType, _: torch.device) -> Rival:
    peer = load_peer("pytorch-optimizer")

    def build(weights: Weights) -> list[Optimizer]:
        matrices = {"params": weights.matrices, "use_muon": True, **SCALARS}
        rest = {"params": weights.rest, "use_muon": False, "betas": BETAS, **SCALARS}
        return [peer.Muon([matrices, rest], momentum=MOMENTUM, use_adjusted_lr=True)]

    return Rival(build, match_rms, JORDAN)


def _muon_optimizer(kernel: ModuleType, _: torch.device) -> Rival:
    peer = load_peer("muon-optimizer")

    def build(weights: Weights) -> list[Optimizer]:
        matrices = {"params": weights.matrices, "use_muon": True, "momentum": MOMENTUM, **SCALARS}
        rest = {"params": weights.rest, "use_muon": False, "betas": BETAS, "eps": 1e-8, **SCALARS}
        return [peer.SingleDeviceMuonWithAuxAdam([matrices, rest])]

    return Rival(build, spectral, JORDAN)


def _gram_newton_schulz(kernel: ModuleType, device: torch.device) -> Rival:
    peer = load_peer("gram-newton-schulz")
    if device.type == "cpu":
        raise MissingError(NEEDS_GPU)

    def build(weights: Weights) -> list[Optimizer]:
        # The setting that it uses by default, without its search and report.
        restarts = [2]
        muon = peer.Muon(weights.matrices, momentum=MOMENTUM, gram_newton_schulz_restart_iterations=restarts, **SCALARS)
        return [muon, AdamW(weights.rest, betas=BETAS, fused=True, **SCALARS)]

    return Rival(build, match_rms, tuple(map(tuple, peer.POLAR_EXPRESS_COEFFICIENTS)))


def _dion(kernel: ModuleType, device: torch.device) -> Rival:
    peer = load_peer("dion", "dion.muon")
    if device.type == "cpu":
        raise MissingError(NEEDS_GPU)

    def build(weights: Weights) -> list[Optimizer]:
        settings = {"mu": MOMENTUM, "nesterov": True, "betas": BETAS, "adjust_lr": "rms_norm", "use_triton": True}
        groups = [{"params": weights.matrices}, {"params": weights.rest, "algorithm": "adamw"}]
        return [peer.Muon(groups, **settings, **SCALARS)]

    return Rival(build, match_rms, kernel.schedules.resolve_schedule("quintic", STEPS))


def _adamw(kernel: ModuleType, _: torch.device) -> Rival:
    return Rival(lambda weights: [AdamW([*weights.matrices, *weights.rest], betas=BETAS, fused=True, **SCALARS)])


_FINDERS = {
    OURS: _ours,
    WARMED_UP: _warmed_up,
    "torch.optim.Muon": _torch_muon,
    "timm": _timm,
    "pytorch-optimizer": _pytorch_optimizer,
    "muon-optimizer": _muon_optimizer,
    "gram-newton-schulz": _gram_newton_schulz,
    "dion": _dion,
    ADAMW: _adamw,
}
NAMES = tuple(_FINDERS)
PEERS = tuple(name for name in NAMES if name not in OWN)
