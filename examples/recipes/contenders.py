"""The recipes that are compared: how each optimizer is made, what it is called, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.peers import load_peer

from ..character_model.comparison import BETAS, WEIGHT_DECAY
from ..character_model.model import HEAD, WIDTH

# (kernel, model, lr, lr of parameters that are not matrices) -> the optimizer of a model, which it may change
Make = Callable[[ModuleType, nn.Module, float, float], Optimizer]


@dataclass(frozen=True)
class Contender:
    """One recipe: `start` is the learning rate at which its tuning begins."""

    name: str
    make: Make
    start: float
    changes: str = ""  # what differs from Muon's line, as it is written
    source: str = ""


def ours(
    settings: Mapping[str, Any], patterns: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float32
) -> Make:
    """Return how our optimizer is made with some settings, of a model whose parameters are of a dtype."""

    def make(kernel: ModuleType, model: nn.Module, lr: float, adamw_lr: float) -> Optimizer:
        groups = kernel.groups_for(model.to(dtype), patterns=patterns)
        common = {"weight_decay": WEIGHT_DECAY, "adamw_lr": adamw_lr, "adamw_betas": BETAS}
        return kernel.Muon(groups, lr=lr, **{**common, **settings})

    return make


def recipe(
    name: str,
    source: str,
    settings: Mapping[str, Any],
    patterns: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    start: float = 2e-2,
) -> Contender:
    """Return a recipe of ours, with its settings as they are written."""
    changes = [f"{key}={value!r}" for key, value in settings.items()]
    changes += [f"{pattern}: {each}" for pattern, each in (patterns or {}).items()]
    changes += [] if dtype == torch.float32 else [f"{str(dtype).replace('torch.', '')} parameters"]
    return Contender(name, ours(settings, patterns, dtype), start, ", ".join(changes), source)


class Both(Optimizer):
    """Two optimizers as one, with the groups of both, which a scheduler changes."""

    def __init__(self, *optimizers: Optimizer):
        self._optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    def step(self, closure: None = None) -> None:
        """Step both; a closure is not called."""
        for optimizer in self._optimizers:
            optimizer.step()


def parts(kernel: ModuleType, model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that our routing gives to Muon, and the others."""
    rows = kernel.route(model.named_parameters()).rows
    of_muon = {row.name for row in rows if row.branch == "muon"}
    named = list(model.named_parameters())
    return [p for name, p in named if name in of_muon], [p for name, p in named if name not in of_muon]


def adamw(kernel: ModuleType, model: nn.Module, lr: float, adamw_lr: float) -> Optimizer:
    return AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def torch_muon(kernel: ModuleType, model: nn.Module, lr: float, adamw_lr: float) -> Optimizer:
    matrices, rest = parts(kernel, model)
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return Both(muon, AdamW(rest, lr=adamw_lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True))


def timm_muon(kernel: ModuleType, model: nn.Module, lr: float, adamw_lr: float) -> Optimizer:
    matrices, rest = parts(kernel, model)
    # With nesterov its fallback would be NAdamW.
    fallback = {"params": rest, "use_fallback": True, "nesterov": False, "lr": adamw_lr, "betas": BETAS}
    settings = {"lr": lr, "weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}
    return load_peer("timm").Muon([{"params": matrices}, fallback], momentum=0.95, nesterov=True, **settings)


BASELINE = "AdamW"
MUON = "Muon"
BFLOAT16 = torch.bfloat16

CONTENDERS = (
    Contender(BASELINE, adamw, 1e-2, "torch.optim.AdamW", "arXiv:1711.05101"),
    recipe(MUON, "Jordan 2024; arXiv:2502.16982", {}),
    Contender("Muon of torch", torch_muon, 2e-2, "torch.optim.Muon, match_rms_adamw", "torch"),
    Contender("Muon of timm", timm_muon, 2e-2, "timm.optim.Muon, match_rms_adamw", "timm"),
    recipe("MuonEq", "arXiv:2603.28254", {"equalize": "rows"}),
    recipe("Muon+", "arXiv:2602.21545", {"renormalize": "frobenius"}),
    recipe("MuonEq and Muon+", "nanochat, 2026", {"equalize": "rows", "renormalize": "frobenius"}),
    recipe("NorMuon", "arXiv:2510.05491", {"second_moment": "rows"}),
    recipe("Aurora", "arXiv:2606.27715", {"equalize": "experimental_aurora"}),
    recipe("Hyperball", "Wen et al. 2025", {"experimental_hyperball": True}),
    recipe("cautious decay", "arXiv:2510.12402", {"decay_mode": "cautious"}),
    recipe("corrected decay", "arXiv:2506.02285", {"decay_mode": "corrected"}),
    recipe("heads alone", "Kimi K3", {}, {"*.qkv.weight": {"split_rows": [HEAD] * (3 * WIDTH // HEAD)}}),
    recipe("8-bit momentum", "arXiv:2509.23106", {"momentum_dtype": "int8"}),
    recipe("bfloat16", "", {}, dtype=BFLOAT16),
    recipe("bfloat16, rounded at random", "", {"stochastic_rounding": True}, dtype=BFLOAT16),
    recipe("bfloat16 and 16 bits", "arXiv:2602.23349", {"master_weights": "split"}, dtype=BFLOAT16),
)


@dataclass(frozen=True)
class Parametrization:
    """How learning rates and first weights follow the width of a model, and the rates that are tried."""

    name: str
    make: Make
    rates: tuple[float, ...]


WIDTHS = (32, 64, 128, 256)
# The width at which muP's learning rate of the head is `adamw_lr`.
BASE_WIDTH = 64


def with_mup(kernel: ModuleType, model: nn.Module, lr: float, adamw_lr: float) -> Optimizer:
    """Steps of one operator norm for all widths; the head starts from zero, with a rate in proportion to 1 / width."""
    nn.init.zeros_(model.lm_head.weight)
    head = {"params": [("lm_head.weight", model.lm_head.weight)], "use_muon": False}
    head["lr"] = adamw_lr * BASE_WIDTH / model.lm_head.in_features
    others = {"params": [(name, p) for name, p in model.named_parameters() if p is not model.lm_head.weight]}
    common = {"weight_decay": WEIGHT_DECAY, "adamw_lr": adamw_lr, "adamw_betas": BETAS}
    return kernel.Muon([others, head], lr=lr, adjust_lr_fn="rms_to_rms", **common)


PARAMETRIZATIONS = (
    Parametrization("match_rms_adamw", ours({}), (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2)),
    Parametrization("rms_to_rms and muP", with_mup, (6.25e-3, 1.25e-2, 2.5e-2, 5e-2, 0.1, 0.2)),
)
