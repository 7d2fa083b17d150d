"""Optimizers of ours into which the state of torch's is imported, and the rates of their groups."""

import torch

from tests.support.published_muons import MATRICES, REST, torch_case
from tests.support.small_model import named_parameters

MUON, ADAMW = 0.02, 0.003  # the rates of `torch_case`
# A rate is a product of two numbers that come from it in two divisions: at most four roundings, and each scheduler's.
ROUNDED = {"rel": 6 * 2**-53, "abs": 0}


def halves(kernel, lr=0.5):
    return kernel.Muon(named_parameters().items(), lr=lr)


def halves_with_a_ratio(kernel):
    return kernel.Muon(named_parameters().items(), lr=0.5, adamw_lr=0.125)


def groups_with_a_ratio(kernel):
    return kernel.Muon(groups_by_hand(), lr=0.5, adamw_lr=0.125)


def groups_with_one_rate(kernel):
    return kernel.Muon(groups_by_hand(), lr=0.5)


def groups_with_rates(kernel):
    matrices, rest = groups_by_hand()
    return kernel.Muon([{**matrices, "lr": 0.5}, {**rest, "lr": 0.25}])


SHARING = [halves, halves_with_a_ratio, groups_with_a_ratio, groups_with_one_rate]


def groups_by_hand():
    params = named_parameters()
    names = {True: MATRICES, False: REST}
    return [{"params": [(name, params[name]) for name in names[muon]], "use_muon": muon} for muon in (True, False)]


def rates(optimizer):
    return [float(group["lr"] * group["lr_factor"]) for group in optimizer.param_groups]


def imported(kernel, optimizer, **changes):
    """The notes of an import of `torch_case` with `changes` in its groups: lists, one value for each file."""
    _, muon, source, others, _ = torch_case()
    for key, values in changes.items():
        for saved, value in zip((muon, others["adamw_state_dict"]), values):
            saved["param_groups"][0][key] = value
    return kernel.import_state(optimizer, muon, source, **others)


def under_one_rate(optimizer, lr):
    """The rates after a loop has set one `lr` for all groups, as OneCycleLR does."""
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=9, div_factor=1)
    return rates(optimizer)
