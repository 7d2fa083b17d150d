"""The models that are trained, and how each optimizer is made."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ..character_model.comparison import BETAS, WEIGHT_DECAY
from ..character_model.training import Problem, Run, Task, next_character, train
from ..recipes.contenders import Both, parts
from ..recipes.trials import corpus
from .digits import digits
from .plan import ADAMW, TORCH, Setting, Training

SMALL = 0.02  # standard deviation of the first weights that transformers gives most language models


@functools.cache
def problem_of(model: str, windows: int) -> Problem:
    """Return what a model of `MODELS` learns; `windows` are of the validation text."""
    if model == "digits":
        return digits()
    torch_initialised = next_character(corpus(), windows)
    if model == "characters":
        return torch_initialised
    return replace(torch_initialised, model=lambda: with_small_weights(torch_initialised.model()))


def with_small_weights(model: nn.Module) -> nn.Module:
    """Return the model after every matrix and table got new, normal weights."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=SMALL)
    return model


def optimizer_of(kernel: ModuleType, model: nn.Module, setting: Setting) -> Optimizer:
    """Return a model's optimizer; what a setting does not name is the optimizer's default, but for AdamW alone."""
    if setting.optimizer == ADAMW:
        return AdamW(model.parameters(), lr=setting.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    if setting.optimizer == TORCH:
        matrices, rest = parts(kernel, model)
        return Both(torch.optim.Muon(matrices, lr=setting.lr), AdamW(rest, lr=setting.adamw_lr))
    rates = {"lr": setting.lr, "adamw_lr": setting.adamw_lr}
    return kernel.Muon(model.named_parameters(), adjust_lr_fn=setting.optimizer, **rates)


def loss_after(training: Training, kernel: ModuleType, windows: int) -> float:
    """Train, and return the last validation loss in nats."""
    setting = training.setting
    make = {setting.optimizer: lambda model, lr: optimizer_of(kernel, model, setting)}
    run = Run(setting.optimizer, setting.lr, training.steps, training.seed)
    record, _, _ = train(run, Task(problem_of(training.model, windows), make, 1), lambda run: None)
    return record.validation[-1]
