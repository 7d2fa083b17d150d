"""Every scheduler of torch moves both branches in step, and OneCycleLR and CyclicLR momentum as well."""

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from tests.support.small_model import named_parameters, same_bits, take_steps

pytestmark = pytest.mark.kernels_ci

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
    "CyclicLR": lambda o: schedulers.CyclicLR(o, base_lr=[0.01, 0.005], max_lr=[0.1, 0.05], step_size_up=2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=8),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, total_iters=2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=[0.002, 0.001], anneal_epochs=4),
}


def test_every_torch_scheduler_is_tested():
    named = {name for name in schedulers.__all__ if name not in ("LRScheduler", "_LRScheduler")}
    assert named <= set(SCHEDULERS)


def run(kernel, name, lr):
    """Five steps under a scheduler, and what the groups said before each of them."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=lr, adamw_lr=lr / 2)
    scheduler, seen = SCHEDULERS[name](optimizer), []
    for step in range(5):
        seen.append([(float(group["lr"]), group["momentum"]) for group in optimizer.param_groups])
        take_steps(optimizer, params, [step])
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    return params, seen


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduled_run_equals_settings_by_hand(kernel, name):
    params, seen = run(kernel, name, 0.02)
    assert len({tuple(groups) for groups in map(tuple, seen)}) > 1
    # Each branch has its own learning rate, and is scaled as the other is.
    assert all(muon[0] == pytest.approx(2 * rest[0]) for muon, rest in seen)
    by_hand = named_parameters()
    optimizer = kernel.Muon(by_hand.items())
    for step, groups in enumerate(seen):
        for group, (lr, momentum) in zip(optimizer.param_groups, groups):
            group.update(lr=lr, momentum=momentum)
        take_steps(optimizer, by_hand, [step])
    assert same_bits(params, by_hand)


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_cyclic_schedulers_cycle_momentum(kernel, name):
    momenta = [muon[1] for muon, _ in run(kernel, name, 0.02)[1]]
    assert max(momenta) == pytest.approx(0.95 if name == "OneCycleLR" else 0.9) and len(set(momenta)) > 2


@pytest.mark.parametrize("name", SCHEDULERS)
def test_tensor_lr_is_scheduled_like_a_number(kernel, name):
    """Each group then has a tensor of its own, here two: torch changes it where it is."""
    numbers, tensors = (run(kernel, name, lr)[1] for lr in (0.02, torch.tensor(0.02, dtype=torch.float64)))
    assert [[lr for lr, _ in groups] for groups in tensors] == [
        [pytest.approx(lr) for lr, _ in groups] for groups in numbers
    ]


def test_scheduler_scales_both_learning_rates(kernel):
    optimizer = kernel.Muon(named_parameters().items(), lr=0.02, adamw_lr=0.004)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.002]


def test_one_cycle_sets_momentum(kernel):
    optimizer = kernel.Muon(named_parameters().items())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, base_momentum=0.8, max_momentum=0.9)
    assert optimizer.param_groups[0]["momentum"] == 0.9
