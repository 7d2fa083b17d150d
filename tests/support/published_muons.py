"""Other optimizers' state dicts, as they save them, and what their next step makes of a parameter, in float64."""

import copy
import math

import torch

from tests.support.iterations import standard
from tests.support.oracles import balance
from tests.support.small_model import named_parameters

MATRICES, REST = ["up.weight", "down.weight"], ["wte.weight", "up.bias", "norm.weight"]
ORIGINAL = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC = [
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]  # fmt: skip
MULTIPLIERS = {
    "original": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "rms": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral": lambda rows, cols: math.sqrt(rows / cols),
}
ADAMW_KEYS = {"step": "step", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Reference:
    """A published Muon in float64: what its state dict holds, and one step of it written out."""

    def __init__(self, muon, rest, multiplier, schedule=ORIGINAL, sums=False, nesterov=True, nadamw=False):
        self.muon, self.rest = muon, rest  # lr, weight decay and momentum; lr, weight decay, betas and eps
        self.multiplier, self.schedule, self.sums = MULTIPLIERS[multiplier], schedule, sums
        self.nesterov, self.nadamw = nesterov, nadamw
        generator = torch.Generator().manual_seed(3)
        self.steps = 7
        self.state = {}
        for name, p in named_parameters().items():
            first, second = (torch.randn(p.shape, generator=generator, dtype=torch.float64) for _ in range(2))
            # Far above every eps, which the references add to the norm and we do not.
            self.state[name] = (1e8 * first, 1e16 * second.square())

    def matrix_step(self, name, p, g):
        lr, decay, beta = self.muon
        g = g if self.sums else (1 - beta) * g
        momentum = beta * self.state[name][0] + g
        X = beta * momentum + g if self.nesterov else momentum
        factor = standard(X / X.norm(), self.schedule)
        return p * (1 - lr * decay) - lr * self.multiplier(*p.shape) * factor

    def other_step(self, name, p, g):
        lr, decay, (beta1, beta2), eps = self.rest
        first = beta1 * self.state[name][0] + (1 - beta1) * g
        second = beta2 * self.state[name][1] + (1 - beta2) * g * g
        ahead = beta1 * first + (1 - beta1) * g if self.nadamw else first
        t = self.steps + 1
        return p * (1 - lr * decay) - lr * ahead / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + eps)


def entries(reference, names, first, momentum="momentum_buffer", adamw=None, **extra):
    """The state of `names` at positions from `first` on, under the keys that an optimizer has."""
    state = {}
    for i, name in enumerate(names, first):
        average, square = reference.state[name]
        if name in MATRICES:
            state[i] = {momentum: average}
        else:
            values = dict(step=torch.tensor(float(reference.steps)), exp_avg=average, exp_avg_sq=square)
            state[i] = {theirs: values[ours] for ours, theirs in (adamw or ADAMW_KEYS).items()}
        state[i] = {**copy.deepcopy(state[i]), **{key: value(name) for key, value in extra.items()}}
    return state


def torch_case(nesterov=True, adjust=None):
    reference = Reference((0.02, 0.1, 0.95), (0.003, 0.2, (0.9, 0.98), 1e-9), adjust or "original", nesterov=nesterov)
    adjust = {"rms": "match_rms_adamw"}.get(adjust, adjust)
    group = dict(lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, ns_coefficients=ORIGINAL[0])
    group.update(eps=1e-7, ns_steps=5, adjust_lr_fn=adjust, params=[0, 1])
    rest = dict(lr=0.003, weight_decay=0.2, betas=(0.9, 0.98), eps=1e-9, amsgrad=False, foreach=None, maximize=False)
    rest.update(capturable=False, differentiable=False, fused=None, decoupled_weight_decay=True, params=[0, 1, 2])
    muon = {"state": entries(reference, MATRICES, 0), "param_groups": [group]}
    adamw = {"state": entries(reference, REST, 0), "param_groups": [rest]}
    return reference, muon, "torch", dict(adamw_state_dict=adamw), {}


def timm_case(nesterov=False, safety=1.0):
    schedule = [tuple(k / safety**n for k, n in zip(QUINTIC[0], (1, 3, 5))), *QUINTIC[1:]]
    rest = (0.02 * 0.25, 0.1, (0.9, 0.95), 1e-7)
    reference = Reference((0.02, 0.1, 0.9), rest, "rms", schedule, nesterov=nesterov, nadamw=nesterov)
    group = dict(lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, ns_steps=5, ns_coefficients="quintic")
    group.update(eps=1e-7, safety_factor=safety, adjust_lr_fn="match_rms_adamw", conv_mode="flatten")
    group.update(normalize_spatial=True, fallback_lr_scale=0.25, betas=(0.9, 0.95), algo="muon", scale_eps=False)
    group.update(capturable=False, verbose=False, params=[0, 1, 2, 3, 4])
    state = entries(reference, named_parameters(), 0, use_muon=lambda name: name in MATRICES)
    return reference, {"state": state, "param_groups": [group]}, "timm", {}, {}


def keller_jordan_case():
    reference = Reference((0.02, 0.01, 0.95), (3e-4, 0.02, (0.9, 0.95), 1e-10), "original")
    rest = dict(params=[0, 1, 2], lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.02, use_muon=False)
    muon = dict(params=[3, 4], lr=0.02, momentum=0.95, weight_decay=0.01, use_muon=True)
    state = {**entries(reference, REST, 0), **entries(reference, MATRICES, 3)}
    for i in range(3):
        state[i]["step"] = reference.steps
    return reference, {"state": state, "param_groups": [rest, muon]}, "keller_jordan", {}, {}


def keller_jordan_alone_case():
    """Its Muon of matrices alone, and the torch.optim.AdamW beside it."""
    reference, state_dict, source, _, _ = keller_jordan_case()
    muon = {"params": [0, 1], "lr": 0.02, "momentum": 0.95, "weight_decay": 0.01}
    rest = {**state_dict["param_groups"][0], "amsgrad": False}
    del rest["use_muon"]
    adamw = {"state": entries(reference, REST, 0), "param_groups": [rest]}
    muon = {"state": entries(reference, MATRICES, 0), "param_groups": [muon]}
    return reference, muon, source, dict(adamw_state_dict=adamw), {}


def motif_case():
    reference = Reference((1e-3, 0.1, 0.9), (1e-3, 0.1, (0.9, 0.95), 1e-8), "rms", QUINTIC, sums=True)
    group = dict(lr=1e-3, weight_decay=0.1, momentum=0.9, nesterov=True, ns_steps=5, adamw_betas=(0.9, 0.95))
    group.update(adamw_eps=1e-8, none_grad=True)
    muon = {**group, "params": [0, 1], "names": MATRICES, "use_muon": True}
    rest = {**group, "params": [2, 3, 4], "use_muon": False}
    keys = {"step": "step", "exp_avg": "moment1", "exp_avg_sq": "moment2"}
    state = entries(reference, [*MATRICES, *REST], 0, adamw=keys)
    # Which coefficients it uses it does not save.
    return reference, {"state": state, "param_groups": [muon, rest]}, "motif", {}, dict(ns_coefficients="quintic")


class Moonlight(Reference):
    """Its AdamW adds eps to the root of the second moment before the correction of the bias, not after it."""

    def other_step(self, name, p, g):
        lr, decay, (beta1, beta2), eps = self.rest
        first = beta1 * self.state[name][0] + (1 - beta1) * g
        second = beta2 * self.state[name][1] + (1 - beta2) * g * g
        t = self.steps + 1
        rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        return p * (1 - lr * decay) - rate * first / (second.sqrt() + eps)


def moonlight_case():
    reference = Moonlight((1e-3, 0.1, 0.95), (1e-3, 0.1, (0.9, 0.95), 1e-8), "rms", sums=True)
    group = dict(lr=1e-3, wd=0.1, momentum=0.95, nesterov=True, ns_steps=5, adamw_betas=(0.9, 0.95), adamw_eps=1e-8)
    keys = {"step": "step", "exp_avg": "moment1", "exp_avg_sq": "moment2"}
    names = [*MATRICES, *REST]
    state = entries(reference, names, 0, adamw=keys, use_muon=lambda name: name in MATRICES)
    for i in (2, 3, 4):
        state[i]["step"] = reference.steps
    return reference, {"state": state, "param_groups": [{**group, "params": [0, 1, 2, 3, 4]}]}, "moonlight", {}, {}


def dion_case(adjust="spectral_norm"):
    multiplier = {"spectral_norm": "spectral", "rms_norm": "rms"}[adjust]
    rest = (0.01, 0.01, (0.9, 0.95), 1e-8)
    reference = Reference((0.01, 0.01, 0.95), rest, multiplier, QUINTIC, sums=True, nesterov=False)
    group = dict(lr=0.01, mu=0.95, beta1=0.9, beta2=0.95, weight_decay=0.01, step=reference.steps, epsilon=1e-8)
    group.update(nesterov=False, flatten=False, adjust_lr=adjust)
    muon = {**group, "params": [0, 1], "algorithm": "muon"}
    rest = {**group, "params": [2, 3, 4], "algorithm": "adamw"}
    keys = {"exp_avg": "momentum", "exp_avg_sq": "variance"}
    state = entries(reference, [*MATRICES, *REST], 0, momentum="momentum", adamw=keys)
    return reference, {"state": state, "param_groups": [muon, rest]}, "dion", {}, dict(ns_coefficients="quintic")


class NorMuon(Reference):
    """dion's NorMuon: each row of a factor divided by the root mean square that it has had, which keeps the norm."""

    def matrix_step(self, name, p, g):
        lr, decay, _ = self.muon
        factor = -super().matrix_step(name, torch.zeros_like(p), g)
        balanced, _ = balance(factor / lr / self.multiplier(*p.shape), self.variance(name), 0.9, "rows")
        return p * (1 - lr * decay) - lr * self.multiplier(*p.shape) * balanced

    def variance(self, name):
        """The second moments (rows, 1) so far."""
        return self.state[name][1].mean(-1, keepdim=True) / 1e17


def dion_normuon_case():
    muon = (0.01, 0.01, 0.95)
    reference = NorMuon(muon, (0.01, 0.01, (0.9, 0.95), 1e-8), "spectral", QUINTIC, sums=True, nesterov=False)
    _, state_dict, _, others, options = dion_case()
    for group in state_dict["param_groups"]:
        group.update(muon_beta2=0.9, cautious_wd=False)
    state_dict["param_groups"][0]["algorithm"] = "normuon"
    for i, name in enumerate(MATRICES):
        state_dict["state"][i]["variance_neuron"] = reference.variance(name)
    return reference, state_dict, "dion_normuon", others, options


CASES = {
    "torch": torch_case,
    "torch without nesterov": lambda: torch_case(False, "rms"),
    "timm": timm_case,
    "timm with nadamw": lambda: timm_case(True),
    "timm with a safety factor": lambda: timm_case(False, 1.02),
    "keller_jordan": keller_jordan_case,
    "keller_jordan of matrices alone": keller_jordan_alone_case,
    "motif": motif_case,
    "moonlight": moonlight_case,
    "dion": dion_case,
    "dion with rms norms": lambda: dion_case("rms_norm"),
    "dion with second moments": dion_normuon_case,
}


# What a constructor must not leave behind.
FOREIGN = dict(lr=0.7, weight_decay=0.9, momentum=0.3, adamw_betas=(0.5, 0.6), adamw_eps=0.1, eps=0.1)
FOREIGN.update(adjust_lr_fn="rms_to_rms", conv_mode="batched")


def fresh(kernel, params=None, **options):
    """Parameters and an optimizer of ours whose settings are none of a source's."""
    params = params or named_parameters(torch.float64)
    return params, kernel.Muon(params.items(), **{**FOREIGN, **options})
