"""What is trained: a grid of short trials for each model, longer runs from what is best there, and the longest ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from ..character_model.comparison import TRIAL_SEED
from ..recipes.trials import tuned

RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2)


@dataclass(frozen=True)
class Grid:
    """What is tried with one model: all pairs of rates, and seeds, of which trials and final runs share none."""

    trial_seeds: tuple[int, ...] = (TRIAL_SEED,)
    final_seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = RATES  # of the matrices
    adamw_rates: tuple[float, ...] = RATES
    others: tuple[str, ...] = ("original", "rms_to_rms")  # multipliers that are tuned, too
    fixed: tuple[float, ...] = (1e-3, 1e-2, 2e-2, 4e-2)  # rates for every parameter that are not tuned


MODELS = {
    "characters": Grid(),
    # Losses of so few images are noisier than those of text.
    "digits": Grid((TRIAL_SEED, TRIAL_SEED + 1), tuple(range(10)), rates=RATES[:5], adamw_rates=RATES[:5]),
    "characters, small initial weights": Grid(rates=RATES[2:5], adamw_rates=RATES[1:5], others=(), fixed=(2e-2,)),
}
LONGEST = "characters"  # the model of the longest runs

ADAMW = "AdamW"
TORCH = "torch.optim.Muon"
MATCH = "match_rms_adamw"
# By which the rates of the other multipliers are likely to be larger than those of MATCH: where their tuning begins.
LARGER = 2.0
SMALL_ADAMW = (2e-2, 3e-3)  # of matrices, and a rate that is common for AdamW alone
TORCH_DEFAULT = 1e-3  # of its Muon and of its AdamW


@dataclass(frozen=True)
class Size:
    """How much is run."""

    longest_rates: tuple[float, ...]  # AdamW's, in the longest runs
    trial_steps: int
    final_steps: int
    longest_steps: int
    most_seeds: int  # of final runs
    windows: int  # of the validation text
    most_trials: int  # learning rates along a line


FULL = Size(RATES[1:5], 200, 300, 1200, 10, 400, 8)
QUICK = Size(RATES[:2], 2, 3, 4, 1, 16, 2)


@dataclass(frozen=True)
class Setting:
    """An optimizer with its rates; `adamw_lr` is of the parameters that are not matrices, and AdamW's is `lr`."""

    optimizer: str
    lr: float
    adamw_lr: float


@dataclass(frozen=True)
class Training:
    """One training run."""

    model: str
    setting: Setting
    steps: int
    seed: int

    @property
    def key(self) -> str:
        setting = self.setting
        return (
            f"{self.model}: {setting.optimizer} {setting.lr:g} {setting.adamw_lr:g}, "
            f"{self.steps} steps, seed {self.seed}"
        )


# A run's last validation loss, in nats.
Measure = Callable[[Training], float]


@dataclass(frozen=True)
class Trials:
    """The trials of one model; their losses are means over its seeds."""

    model: str
    size: Size
    measure: Measure

    @property
    def rates(self) -> tuple[float, ...]:
        return MODELS[self.model].rates[: self.size.most_trials]

    @property
    def adamw_rates(self) -> tuple[float, ...]:
        return MODELS[self.model].adamw_rates[: self.size.most_trials]

    def loss(self, setting: Setting) -> float:
        """Return the mean loss of a setting's trials; infinity where training came to no number."""
        steps, seeds = self.size.trial_steps, MODELS[self.model].trial_seeds
        mean = fmean(self.measure(Training(self.model, setting, steps, seed)) for seed in seeds)
        return mean if math.isfinite(mean) else math.inf

    def grid(self) -> list[Setting]:
        return [Setting(MATCH, lr, adamw_lr) for lr in self.rates for adamw_lr in self.adamw_rates]

    def best_of_grid(self) -> Setting:
        return min(self.grid(), key=self.loss)

    def best_single_rate(self) -> Setting:
        return min((each for each in self.grid() if each.lr == each.adamw_lr), key=self.loss)

    def best_adamw(self) -> Setting:
        lr = self.best_rate(lambda lr: Setting(ADAMW, lr, lr), 1e-2)
        return Setting(ADAMW, lr, lr)

    def best_of_other(self, adjust_lr_fn: str) -> Setting:
        """Tune the rate of matrices, then AdamW's, from those of MATCH."""
        start = self.best_of_grid()
        lr = self.best_rate(lambda lr: Setting(adjust_lr_fn, lr, start.adamw_lr), start.lr * LARGER)
        adamw_lr = self.best_rate(lambda adamw_lr: Setting(adjust_lr_fn, lr, adamw_lr), start.adamw_lr)
        return Setting(adjust_lr_fn, lr, adamw_lr)

    def best_rate(self, setting_of: Callable[[float], Setting], start: float) -> float:
        losses: dict[float, float] = {}

        def loss(rate: float) -> float:
            return losses.setdefault(rate, self.loss(setting_of(rate)))

        return tuned(loss, losses, start, self.size.most_trials)


def candidates(model: str, size: Size, measure: Measure) -> dict[str, Setting]:
    """Return what trains from every seed, by what it is called; its trials are measured on the way."""
    trials = Trials(model, size, measure)
    adamw = trials.best_adamw()
    chosen = {
        "AdamW, tuned": adamw,
        "one rate, tuned": trials.best_single_rate(),
        "both rates, tuned": trials.best_of_grid(),
        **{f"one rate, {lr:g}": Setting(MATCH, lr, lr) for lr in MODELS[model].fixed},
        "AdamW's best rate, the class changed": Setting(MATCH, adamw.lr, adamw.lr),
        f"lr={SMALL_ADAMW[0]:g}, adamw_lr={SMALL_ADAMW[1]:g}": Setting(MATCH, *SMALL_ADAMW),
        **{f"`{name}`, both tuned": trials.best_of_other(name) for name in MODELS[model].others},
    }
    if model == LONGEST:  # And not digits: torch's Muon takes no convolutions.
        chosen["`torch.optim.Muon` and AdamW at their defaults"] = Setting(TORCH, TORCH_DEFAULT, TORCH_DEFAULT)
    return chosen


def finals(model: str, setting: Setting, size: Size) -> list[Training]:
    """Return the runs of a candidate."""
    return [Training(model, setting, size.final_steps, seed) for seed in MODELS[model].final_seeds[: size.most_seeds]]


def longest(size: Size, measure: Measure) -> list[Training]:
    """Return the longest runs, of one seed: the best rate of matrices with each of AdamW's, and half of it with two.

    Also AdamW alone, at its best rate and at half of it.
    """
    trials = Trials(LONGEST, size, measure)
    lr, adamw = trials.best_of_grid().lr, trials.best_adamw().lr
    settings = [Setting(MATCH, lr, adamw_lr) for adamw_lr in size.longest_rates]
    settings += [Setting(MATCH, lr / 2, lr / 2), Setting(MATCH, lr / 2, lr / 4)]
    settings += [Setting(ADAMW, rate, rate) for rate in (adamw, adamw / 2)]
    return [Training(LONGEST, setting, size.longest_steps, MODELS[LONGEST].final_seeds[0]) for setting in settings]
