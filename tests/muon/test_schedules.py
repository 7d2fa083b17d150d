"""Every scheduler of torch moves both branches in step, one rate for all groups or not, and some momentum as well."""

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from tests.support.small_model import named_parameters, same_bits, take_steps

SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, milestones=[1, 3], gamma=0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.5, total_iters=2),
    "LinearLR": lambda o: schedulers.LinearLR(o, start_factor=0.25, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=8),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=3),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, total_iters=2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.002, anneal_epochs=4),
}


MATRICES = ("up.weight", "down.weight")


def test_every_torch_scheduler_is_tested():
    named = {name for name in schedulers.__all__ if name not in ("LRScheduler", "_LRScheduler")}
    assert named <= set(SCHEDULERS)


def run(kernel, name, lr):
    """Five steps under a scheduler, and what the groups said before each of them."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=lr, adamw_lr=0.01)
    scheduler, seen = SCHEDULERS[name](optimizer), []
    for step in range(5):
        seen.append([(float(group["lr"]), group["momentum"]) for group in optimizer.param_groups])
        take_steps(optimizer, params, [step])
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert [group["lr_factor"] for group in optimizer.param_groups] == [1.0, 0.5]
    return params, seen


def run_by_hand(kernel, seen):
    """The same steps with a group of each branch, whose rates are set to what they should be."""
    params = named_parameters()
    branches = (
        [(name, p) for name, p in params.items() if name in MATRICES],
        [(name, p) for name, p in params.items() if name not in MATRICES],
    )
    optimizer = kernel.Muon([{"params": branches[0]}, {"params": branches[1], "use_muon": False}])
    for step, ((lr, momentum), _) in enumerate(seen):
        for group, rate in zip(optimizer.param_groups, (lr, lr / 2)):
            group.update(lr=rate, momentum=momentum)
        take_steps(optimizer, params, [step])
    assert [group["lr_factor"] for group in optimizer.param_groups] == [1.0, 1.0]
    return params


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_ratio_of_both_rates_survives_every_scheduler(kernel, name):
    """Those as well that set one rate for all groups; the step is that of separate groups with these rates."""
    params, seen = run(kernel, name, 0.02)
    assert len({tuple(groups) for groups in map(tuple, seen)}) > 1
    assert all(muon[0] == rest[0] for muon, rest in seen)
    assert same_bits(params, run_by_hand(kernel, seen))


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_the_ratio_survives_the_usual_loop(kernel, fallback):
    """`for group in param_groups: group["lr"] = x`, also where no scheduler multiplies without rounding."""
    rates, params, others = (0.02, 0.05, 0.01), named_parameters(), named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02, adamw_lr=0.003, fallback=fallback)
    alone = kernel.Muon(others.items(), fallback=fallback)
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for group, factor in zip(alone.param_groups, (1.0, 0.003 / 0.02)):
            group["lr"] = rate * factor
        take_steps(optimizer, params, [step])
        take_steps(alone, others, [step])
    assert same_bits(params, others)


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_cyclic_schedulers_cycle_momentum(kernel, name):
    momenta = [muon[1] for muon, _ in run(kernel, name, 0.02)[1]]
    assert max(momenta) == pytest.approx(0.95 if name == "OneCycleLR" else 0.9) and len(set(momenta)) > 2


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "ReduceLROnPlateau"])
def test_tensor_lr_is_scheduled_like_a_number(kernel, name):
    """Both halves have one tensor then, which torch changes where it is, for each group to the same number."""
    numbers, tensors = (run(kernel, name, lr)[1] for lr in (0.02, torch.tensor(0.02, dtype=torch.float64)))
    assert [[lr for lr, _ in groups] for groups in tensors] == [
        [pytest.approx(lr) for lr, _ in groups] for groups in numbers
    ]


def test_a_shared_tensor_is_reduced_on_a_plateau_once_for_each_group_as_by_torch(kernel):
    """That scheduler alone reads a group's rate after it has changed the one before; a number does not mind."""

    def reduced(optimizer):
        scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for _ in range(2):
            scheduler.step(1.0)
        return [float(group["lr"]) for group in optimizer.param_groups]

    groups = [{"params": [p]} for p in named_parameters().values()][:2]
    torchs = reduced(torch.optim.AdamW(groups, lr=torch.tensor(0.5)))
    assert reduced(kernel.Muon(named_parameters().items(), lr=torch.tensor(0.5))) == torchs == [0.125, 0.125]
    assert reduced(kernel.Muon(named_parameters().items(), lr=0.5)) == [0.25, 0.25]


def test_scheduler_scales_both_learning_rates(kernel):
    optimizer = kernel.Muon(named_parameters().items(), lr=0.02, adamw_lr=0.004)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert [(group["lr"], group["lr_factor"]) for group in optimizer.param_groups] == [(0.01, 1.0), (0.01, 0.2)]


def test_one_cycle_sets_momentum(kernel):
    optimizer = kernel.Muon(named_parameters().items())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, base_momentum=0.8, max_momentum=0.9)
    assert optimizer.param_groups[0]["momentum"] == 0.9
