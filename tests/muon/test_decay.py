"""Weight decay does what its mode says, as a number and as a tensor."""

import copy
import math

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import matrix, named_parameters, same_bits, take_steps

pytestmark = pytest.mark.kernels_ci


MODES = ("decoupled", "independent", "cautious", "corrected")
LARGEST = 0.4  # rate of `corrected` decay


def decayed(kernel, mode, p, gradient, lr, decay):
    """The step of one matrix, in float64."""
    factor = kernel.orthogonalize(gradient.double(), dtype=torch.float64) * 0.2 * math.sqrt(max(p.shape))
    p = p.double()
    keep = 1 - {"independent": decay, "corrected": lr * (lr / LARGEST) * decay}.get(mode, lr * decay)
    return (p * keep if mode != "cautious" else torch.where(p * factor > 0, p * keep, p)) - lr * factor


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
def test_decay_follows_its_mode(kernel, mode, as_tensor):
    p = Parameter(matrix(12, 20, 0, torch.float64))
    lr, decay = (torch.tensor(v, dtype=torch.float64) if as_tensor else v for v in (0.1, 0.3))
    settings = dict(lr=lr, weight_decay=decay, decay_mode=mode, momentum=0.0, ns_dtype="float32")
    optimizer = kernel.Muon([{"params": [p], "decay_lr": LARGEST}], **settings)
    gradient = matrix(12, 20, 1, torch.float64)
    p.grad, expected = gradient.clone(), decayed(kernel, mode, p.detach(), gradient, 0.1, 0.3)
    optimizer.step()
    # The iteration is in float32: its roundings, amplified by the product of all a, times lr and multiplier.
    gain = math.prod(a for a, _, _ in kernel.polar_express())
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=0.1 * 0.2 * 20**0.5 * gain * 2**-23)


def test_decay_modes_differ_from_each_other(kernel):
    p, gradient = matrix(12, 20, 0), matrix(12, 20, 1)
    results = [decayed(kernel, mode, p, gradient, 0.1, 0.3) for mode in MODES]
    assert min((a - b).abs().max() for a in results for b in results if a is not b) > 0.01


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use_muon", [True, False], ids=["muon", "adamw"])
def test_a_float64_rate_on_the_device_decays_as_the_number(kernel, mode, use_muon):
    """A decay of 0.1 is not one of 0.1 in float32. AdamW divides by tensors with one rounding more."""
    results = []
    for lr in (2.0**-4, torch.tensor(2.0**-4, dtype=torch.float64)):
        p = Parameter(matrix(12, 20, 0, torch.float64))
        group = {"params": [p], "use_muon": use_muon, "decay_lr": LARGEST}
        optimizer = kernel.Muon([group], lr=lr, weight_decay=0.1, decay_mode=mode, ns_dtype="float32")
        p.grad = matrix(12, 20, 1, torch.float64)
        optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=4 * 2.0**-53, atol=4 * 2.0**-53)


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensor_weight_decay_is_live_and_equals_the_number(kernel, fallback, dtype):
    """In half precision, too, where a factor of 1 - lr * weight_decay of its own would round to 1."""
    results = []
    for decay in (0.1, torch.tensor(9.0)):
        params = named_parameters(dtype)
        optimizer = kernel.Muon(params.items(), lr=2.0**-8, weight_decay=decay, fallback=fallback)
        if isinstance(decay, torch.Tensor):
            decay.fill_(0.1)
        take_steps(optimizer, params, range(3))
        results.append(params)
    for name in results[0]:
        # The factor is rounded to float32 before it is applied, not after.
        torch.testing.assert_close(results[0][name], results[1][name], rtol=2**-22, atol=2**-22)


STEPS = 3
LRS = (0.125, 0.0625, 0.0)
DECAY = 0.25


def exact_adam(mode, fallback, p, gradients):
    """The steps of one parameter of AdamW or NAdamW by LRS and DECAY, in float64; betas 0.9 and 0.95, eps 1e-8."""
    p, average, square = p.double(), 0.0, 0.0
    for t, (gradient, lr) in enumerate(zip(gradients, LRS), 1):
        average = 0.9 * average + 0.1 * gradient.double()
        square = 0.95 * square + 0.05 * gradient.double() ** 2
        ahead = 0.9 * average + 0.1 * gradient.double() if fallback == "nadamw" else average
        step = lr * (ahead / (1 - 0.9**t)) / ((square / (1 - 0.95**t)).sqrt() + 1e-8)
        shares = {"independent": DECAY * (lr != 0), "corrected": lr * lr / LRS[0] * DECAY}
        taken = p * shares.get(mode, lr * DECAY)
        p = p - (taken.where(p * step > 0, 0) if mode == "cautious" else taken) - step
    return p


def trained(kernel, p, gradients, lrs, as_tensor=False, **settings):
    """A parameter after steps with these gradients and learning rates, by the fallback."""
    p = Parameter(p.clone())
    number = (lambda value: torch.tensor(value, dtype=torch.float64)) if as_tensor else float
    settings["weight_decay"] = number(settings["weight_decay"])
    optimizer = kernel.Muon([("norm.weight", p)], lr=number(lrs[0]), **settings)
    for gradient, lr in zip(gradients, lrs):
        p.grad = gradient.to(p.dtype)
        optimizer.param_groups[0]["lr"] = number(lr)
        optimizer.step()
    return p.detach()


any_mode = pytest.mark.parametrize("mode", MODES)
any_fallback = pytest.mark.parametrize("fallback", ["adamw", "nadamw"])


@any_mode
@any_fallback
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_fallbacks_decay_follows_its_mode(kernel, mode, fallback, as_tensor, dtype):
    """A rate of 0 leaves every parameter as it is; `corrected` decays by the first rate here.

    Each step rounds the parameter three times at most, and the update, below 2 lr, some ten times.
    """
    p, *gradients = (matrix(1, 77, seed, dtype)[0] for seed in range(1 + STEPS))
    settings = dict(fallback=fallback, weight_decay=DECAY, decay_mode=mode)
    result = trained(kernel, p, gradients, LRS, as_tensor, **settings)
    exact = exact_adam(mode, fallback, p, gradients)
    unit = torch.finfo(dtype).eps / 2
    assert ((result.double() - exact).abs() <= unit * STEPS * (3 * p.abs().double() + 12 * 2 * LRS[0])).all()


@any_fallback
def test_the_fallbacks_modes_differ_from_each_other(kernel, fallback):
    p, *gradients = (matrix(1, 77, seed)[0] for seed in range(1 + STEPS))
    exact = [exact_adam(mode, fallback, p, gradients) for mode in MODES]
    assert min((a - b).abs().max() for a in exact for b in exact if a is not b) > 1e-3


@any_mode
@any_fallback
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_fallbacks_decay_in_half_precision_is_rounded_once(kernel, mode, fallback, dtype):
    """After one step the parameter is the one of float32, rounded."""
    p, gradient = (matrix(1, 77, seed, dtype)[0] for seed in range(2))
    settings = dict(fallback=fallback, weight_decay=DECAY, decay_mode=mode)
    half, single = (trained(kernel, start, [gradient], [0.0625], **settings) for start in (p, p.float()))
    assert torch.equal(half, single.to(dtype))


@any_mode
@any_fallback
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_part_of_a_parameter_has_the_bits_of_the_whole(kernel, mode, fallback, dtype):
    """Wherever it is cut: vectors and what is left behind them."""
    p, *gradients = (matrix(1, 100, seed, dtype)[0] for seed in range(1 + STEPS))
    settings = dict(fallback=fallback, weight_decay=DECAY, decay_mode=mode)
    whole = trained(kernel, p, gradients, LRS, **settings)
    for part in slice(0, 33), slice(33, 100), slice(7, 8), slice(3, 99):
        result = trained(kernel, p[part], [gradient[part] for gradient in gradients], LRS, **settings)
        assert torch.equal(result, whole[part])


def largest_rates(optimizer):
    return [group["decay_lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_corrected_decay_is_decoupled_decay_of_the_scaled_number(kernel, fallback):
    """By the rate that each group began with, under a scheduler that sets another one first; for matrices, too."""
    corrected, decoupled = named_parameters(), named_parameters()
    settings = dict(lr=0.5, adamw_lr=0.25, fallback=fallback)
    ours = kernel.Muon(corrected.items(), decay_mode="corrected", weight_decay=0.125, **settings)
    reference = kernel.Muon(decoupled.items(), **settings)
    assert largest_rates(ours) == [0.5, 0.5]  # in the units of `lr`, which both halves have
    warmup = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: (0.25, 1.0, 0.5)[min(step, 2)])
    for seed, share in enumerate((0.25, 1.0, 0.5)):
        for group in reference.param_groups:
            group["lr"], group["weight_decay"] = share * 0.5, share * 0.125
        take_steps(ours, corrected, [seed])
        take_steps(reference, decoupled, [seed])
        warmup.step()
        assert same_bits(corrected, decoupled)


def test_the_rate_of_corrected_decay_is_saved(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=torch.tensor(0.5), decay_mode="corrected")
    optimizer.param_groups[0]["lr"].fill_(0.1)
    other = kernel.Muon(named_parameters().items(), lr=0.01, decay_mode="corrected")
    other.load_state_dict(optimizer.state_dict())
    assert largest_rates(other) == [0.5, 0.5] == largest_rates(optimizer)


def test_each_half_is_measured_by_the_rate_that_it_starts_with(kernel):
    """A tensor as `adamw_lr` has no ratio to `lr`, so AdamW's half has that as its `lr`."""
    optimizer = kernel.Muon(named_parameters().items(), lr=0.5, adamw_lr=torch.tensor(0.125), decay_mode="corrected")
    assert largest_rates(optimizer) == [0.5, 0.125]
    with_rate = kernel.Muon([{"params": named_parameters().items(), "decay_lr": 0.5}])  # for a mode that is set later
    assert largest_rates(with_rate) == [0.5, 0.5]


def test_corrected_decay_without_a_rate_raises(kernel):
    params = named_parameters()
    with pytest.raises(ValueError, match=r"lr is 0\.0: give each group a decay_lr"):
        kernel.Muon(params.items(), lr=0.0, decay_mode="corrected")
    with pytest.raises(ValueError, match="decay_lr must be above 0, got 0"):
        kernel.Muon([{"params": params.items(), "decay_lr": 0}], decay_mode="corrected")
    with pytest.raises(ValueError, match="applies to one lr, and this group has two"):
        kernel.Muon(
            [{"params": params.items(), "decay_lr": 0.5, "adamw_lr": torch.tensor(0.1)}], decay_mode="corrected"
        )
    both = kernel.Muon([{"params": params.items(), "decay_lr": 0.5, "adamw_lr": 0.1}], decay_mode="corrected")
    assert largest_rates(both) == [0.5, 0.5]
    with_rate = kernel.Muon([{"params": params.items(), "decay_lr": 0.5}], lr=0.0, decay_mode="corrected")
    assert largest_rates(with_rate) == [0.5, 0.5]
    later = kernel.Muon(params.items())
    for group in later.param_groups:
        group["decay_mode"] = "corrected"
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match="a group that gets this mode after construction needs a decay_lr"):
        take_steps(later, params, [0])
    assert same_bits(params, before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("adamw_lr", [0.0, 0.25, 1.0])
def test_a_factor_decays_as_the_rate_that_it_makes(kernel, mode, fallback, adamw_lr):
    """Also with a tensor for `lr`, and where the factor is 0, at which nothing decays."""

    def trained_by(**rates):
        params = {name: p for name, p in named_parameters().items() if p.ndim == 1}
        group = {"params": params.items(), "decay_lr": LARGEST, **rates}
        optimizer = kernel.Muon([group], decay_mode=mode, fallback=fallback, weight_decay=0.125)
        take_steps(optimizer, params, range(2))
        return params

    made = trained_by(lr=0.5, adamw_lr=adamw_lr)
    by_hand = trained_by(lr=adamw_lr, decay_lr=(adamw_lr or 0.5) * LARGEST / 0.5)
    of_a_tensor = trained_by(lr=torch.tensor(0.5), adamw_lr=adamw_lr)
    assert same_bits(made, by_hand)
    for name in made:
        # What decay leaves is rounded to float32 before it is applied, and after.
        torch.testing.assert_close(of_a_tensor[name], made[name], rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("mode", MODES)
def test_explain_names_a_decay_that_is_not_decoupled(kernel, mode):
    """Of both branches, as the group says it now."""
    optimizer = kernel.Muon(named_parameters().items())
    for group in optimizer.param_groups:
        group.update(decay_mode=mode, decay_lr=LARGEST)
    rows = optimizer.explain().rows
    assert {row.branch for row in rows} == {"muon", "adamw"}
    assert all((f", {mode} decay" in row.kernel) == (mode != "decoupled") for row in rows)
