"""Muons that no test can install, as optimizers in float64, by the formulas and with the arguments that they have.

Each keeps a sum of gradients and adds eps to its norm. Arguments are as many as there. The rest is torch's AdamW, whose
formula they all have but Moonlight's.
"""

import json
import math
from pathlib import Path
from typing import Callable, NamedTuple, Optional, Sequence

import torch

from tests.support.iterations import standard
from tests.support.oracles import balance
from tests.support.published_muons import MULTIPLIERS, ORIGINAL, QUINTIC

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "coefficients.json"
# https://github.com/microsoft/dion, dion/polar_express.py, 0a059a4
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


class Recipe(NamedTuple):
    """Settings of one group, and of the iteration: what the norm is multiplied with, and what is added to it."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    schedule: Sequence
    multiplier: Callable[[int, int], float]
    eps: float
    factor: float = 1.0
    cautious: bool = False
    beta2: Optional[float] = None  # of NorMuon


class SummedMuon:
    """Muon of one recipe for matrices, and torch's AdamW with `adamw` as its settings for the rest."""

    def __init__(self, matrices, rest, recipe, adamw):
        self.recipe, self.parameters = recipe, [p for _, p in matrices]
        self.sums = [torch.zeros_like(p) for p in self.parameters]
        self.moments = [p.new_zeros(p.size(0), 1) for p in self.parameters]
        self.rest = [p for _, p in rest]
        self.adamw = torch.optim.AdamW(self.rest, **{**adamw, **(dict(weight_decay=0.0) if recipe.cautious else {})})

    @torch.no_grad()
    def step(self):
        r = self.recipe
        for i, p in enumerate(self.parameters):
            self.sums[i] = r.momentum * self.sums[i] + p.grad
            direction = r.momentum * self.sums[i] + p.grad if r.nesterov else self.sums[i]
            factor = standard(direction / (r.factor * direction.norm() + r.eps), r.schedule)
            if r.beta2 is not None:
                factor, self.moments[i] = balance(factor, self.moments[i], r.beta2, "rows")
            decayed = (p * factor >= 0) if r.cautious else 1.0
            p.sub_(r.lr * r.weight_decay * p * decayed + r.lr * r.multiplier(*p.shape) * factor)
        self.adamw_step()

    def adamw_step(self):
        """AdamW's step; with `cautious` its decay takes only what the step goes on to shrink."""
        before = [p.clone() for p in self.rest]
        self.adamw.step()
        if self.recipe.cautious:
            for p, old in zip(self.rest, before):
                going = old * self.adamw.state[p]["exp_avg"] >= 0
                p.sub_(self.recipe.lr * self.recipe.weight_decay * old * going)


def motif(
    matrices, rest, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_steps=5, adamw_betas=(0.9, 0.95),
    adamw_eps=1e-8, **_,
):  # fmt: skip
    """The Motif kernel's Muon; other arguments of it say how, and not what, is computed."""
    schedules = json.loads(GOLDEN.read_text())["schedules"]
    (schedule,) = (s["coefficients_exact"] for s in schedules if s["id"] == "schedule_l0.001_n10_s0.01_c0.02")
    recipe = Recipe(lr, weight_decay, momentum, nesterov, schedule[:ns_steps], MULTIPLIERS["rms"], 1e-7)
    return SummedMuon(matrices, rest, recipe, dict(lr=lr, weight_decay=weight_decay, betas=adamw_betas, eps=adamw_eps))


class SummedMoonlight(SummedMuon):
    """Moonlight's Muon, whose AdamW adds eps to the root of the second moment before it corrects the bias."""

    def __init__(self, matrices, rest, recipe, adamw):
        super().__init__(matrices, rest, recipe, adamw)
        self.settings, self.steps = adamw, 0
        self.averages = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.rest]

    def adamw_step(self):
        (beta1, beta2), self.steps = self.settings["betas"], self.steps + 1
        rate = self.recipe.lr * math.sqrt(1 - beta2**self.steps) / (1 - beta1**self.steps)
        for i, p in enumerate(self.rest):
            first, second = self.averages[i]
            first, second = beta1 * first + (1 - beta1) * p.grad, beta2 * second + (1 - beta2) * p.grad**2
            self.averages[i] = first, second
            p.sub_(
                self.recipe.lr * self.recipe.weight_decay * p + rate * first / (second.sqrt() + self.settings["eps"])
            )

    def state_dict(self):
        """As it saves one: one group, and the branch of a parameter in its state."""
        r, a = self.recipe, self.settings
        group = dict(lr=r.lr, wd=r.weight_decay, momentum=r.momentum, nesterov=r.nesterov, ns_steps=len(r.schedule))
        group.update(adamw_betas=a["betas"], adamw_eps=a["eps"])
        state = [dict(use_muon=True, momentum_buffer=each) for each in self.sums]
        state += [dict(use_muon=False, step=self.steps, moment1=m, moment2=v) for m, v in self.averages]
        return {"state": dict(enumerate(state)), "param_groups": [{**group, "params": list(range(len(state)))}]}


def moonlight(
    matrices, rest, lr=1e-3, wd=0.1, momentum=0.95, nesterov=True, ns_steps=5, adamw_betas=(0.9, 0.95), adamw_eps=1e-8,
):  # fmt: skip
    """The Muon of https://github.com/MoonshotAI/Moonlight, examples/toy_train.py, c2ad5b2."""
    recipe = Recipe(lr, wd, momentum, nesterov, ORIGINAL[:1] * ns_steps, MULTIPLIERS["rms"], 1e-7)
    return SummedMoonlight(matrices, rest, recipe, dict(lr=lr, weight_decay=wd, betas=adamw_betas, eps=adamw_eps))


def dion(
    matrices, rest, lr=0.01, mu=0.95, muon_beta2=None, betas=(0.9, 0.95), weight_decay=0.01, cautious_wd=False,
    epsilon=1e-8, nesterov=False, adjust_lr="spectral_norm", use_polar_express=True, **_,
):  # fmt: skip
    """dion's Muon, with `muon_beta2` its NorMuon; other arguments of it say how, and not what, is computed."""
    names = {"spectral_norm": MULTIPLIERS["spectral"], "rms_norm": MULTIPLIERS["rms"], None: lambda rows, cols: 1.0}
    iteration = (POLAR_EXPRESS, 1.02) if use_polar_express else (QUINTIC, 1.0)
    recipe = Recipe(
        lr, weight_decay, mu, nesterov, iteration[0], names[adjust_lr], epsilon, iteration[1], cautious_wd, muon_beta2
    )
    return SummedMuon(matrices, rest, recipe, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=epsilon))


def normuon(*halves, muon_beta2=0.95, **settings):
    """dion's NorMuon, with the arguments of `dion`."""
    return dion(*halves, muon_beta2=muon_beta2, **settings)


def wrapper(
    matrices, rest, lr=3e-3, momentum=0.95, nesterov=True, weight_decay=0.01, ns_mode="fp32", ns_iters=5,
    betas=(0.9, 0.95), eps=1e-8, adam_lr_scale=1.0,
):  # fmt: skip
    """The Muon class with Newton-Schulz in float32 or float16, whose three coefficients are divided by 1.02 then."""
    safety = 1.02 if ns_mode == "fp16" else 1.0
    schedule = [tuple(k / safety for k in ORIGINAL[0])] * ns_iters
    recipe = Recipe(lr, weight_decay, momentum, nesterov, schedule, MULTIPLIERS["rms"], 1e-7)
    adamw = dict(lr=lr * adam_lr_scale, weight_decay=weight_decay, betas=betas, eps=eps)
    return SummedMuon(matrices, rest, recipe, adamw)
