"""Rates of groups: which of those that are given counts, the factor of AdamW's, and what states had before factors."""

import copy
import io
import re
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from tests.support.small_model import named_parameters, same_bits, state_of, take_steps


@pytest.mark.parametrize(
    "group, constructor, expected",
    [
        ({}, dict(lr=0.25), (0.25, 1.0)),
        ({}, dict(lr=0.25, adamw_lr=0.5), (0.25, 2.0)),
        ({"lr": 0.75}, dict(lr=0.25, adamw_lr=0.5), (0.75, 1.0)),
        ({"lr": 0.75, "adamw_lr": 1.5}, dict(lr=0.25, adamw_lr=0.5), (0.75, 2.0)),
        ({"lr": None, "adamw_lr": None}, dict(lr=0.25, adamw_lr=0.5), TypeError),
        ({"use_muon": False}, dict(lr=0.25, adamw_lr=0.5), (0.25, 2.0)),
        ({"use_muon": False, "lr": 0.75}, dict(lr=0.25, adamw_lr=0.5), (0.75, 1.0)),
        ({"adamw_lr": None}, dict(lr=0.25, adamw_lr=0.5), (0.25, 2.0)),
        ({"lr_factor": 4, "adamw_lr": 1.5}, dict(lr=0.25), (0.25, 4.0)),
        ({}, dict(lr=torch.tensor(0.25), adamw_lr=0.5), (0.25, 2.0)),
        ({}, dict(lr=0.25, adamw_lr=torch.tensor(0.5)), (0.5, 1.0)),
        ({}, dict(lr=0.0, adamw_lr=0.5), (0.5, 1.0)),
        ({}, dict(lr=5e-324, adamw_lr=0.5), (0.5, 1.0)),
        ({}, dict(lr=0.25, adamw_lr=0.0), (0.25, 0.0)),
    ],
    ids=str,
)
def test_nearest_learning_rate_wins(kernel, group, constructor, expected):
    """It is a factor of `lr` where there is one; a tensor is a knob of its own, and 0 has no multiples."""
    group = {"params": [("norm.weight", Parameter(torch.ones(8)))], **group}
    if expected is TypeError:
        with pytest.raises(TypeError, match="lr must be a number, got None"):
            kernel.Muon([group], **constructor)
        return
    (made,) = kernel.Muon([group], **constructor).param_groups
    assert (made["lr"], made["lr_factor"]) == expected


@pytest.mark.parametrize(
    "group, constructor, expected",
    [
        ({}, dict(weight_decay=0.25), 0.25),
        ({}, dict(weight_decay=0.25, adamw_weight_decay=0.5), 0.5),
        ({}, dict(weight_decay=0.25, adamw_weight_decay=0.0), 0.0),
        ({"weight_decay": 0.0}, dict(weight_decay=0.25, adamw_weight_decay=0.5), 0.0),
        ({"weight_decay": 0.75, "adamw_weight_decay": 1.5}, dict(adamw_weight_decay=0.5), 1.5),
        ({"adamw_weight_decay": 1.5}, dict(weight_decay=0.25), 1.5),
        ({"use_muon": False}, dict(weight_decay=0.25, adamw_weight_decay=torch.tensor(0.5)), 0.5),
    ],
    ids=str,
)
def test_nearest_weight_decay_wins(kernel, group, constructor, expected):
    """As for the learning rate; it is AdamW's alone, whether its parameters come alone or beside matrices."""
    group = {"params": [("norm.weight", Parameter(torch.ones(8)))], **group}
    (made,) = kernel.Muon([group], **constructor).param_groups
    assert made["weight_decay"] == expected and made["adamw_weight_decay"] is None
    if "use_muon" not in group:
        both = {**group, "params": [*group["params"], ("up.weight", Parameter(torch.ones(8, 8)))]}
        muons, adamws = kernel.Muon([both], **constructor).param_groups
        assert adamws["weight_decay"] == expected
        assert muons["weight_decay"] == group.get("weight_decay", constructor.get("weight_decay", 0.1))


@pytest.mark.parametrize("key, stronger", [("adamw_lr", "lr"), ("adamw_weight_decay", "weight_decay")])
def test_an_argument_for_adamw_that_no_group_takes_is_a_warning(kernel, key, stronger):
    matrix, bias = ("w", Parameter(torch.ones(8, 8))), ("b", Parameter(torch.ones(8)))
    matrices, routed = {"params": [matrix], "use_muon": True}, {"params": [matrix]}
    groups = [{"params": [bias], stronger: 0.1}, {"params": [bias], stronger: 0.1, key: 0.2}]
    for group in groups:
        for first in (matrices, routed):
            with pytest.warns(
                UserWarning, match=f"^{key}=0.5 has no effect, because every group .* has its own {stronger}"
            ):
                kernel.Muon([first, group], **{key: 0.5})
    taken = [groups[0], {"params": [("c", Parameter(torch.ones(8)))]}], [matrix, bias], [{"params": [bias], key: 0.5}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for params in (*taken, [matrices], [{**groups[0], stronger: 0.5}]):
            kernel.Muon(params, **{key: 0.5})
        kernel.Muon([matrices, groups[0]])


def test_adamws_parameters_decay_by_their_own_weight_decay(kernel):
    """Gradients of zero move nothing, so that a step shows the decay alone."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.5, weight_decay=0.25, adamw_weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in params.items()}
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    branches = {row.name: row.branch for row in optimizer.explain().rows}
    assert set(branches.values()) == {"muon", "adamw"}
    for name, p in params.items():
        keep = 1 - 0.5 * (0.25 if branches[name] == "muon" else 0.5)
        torch.testing.assert_close(p.detach(), keep * before[name], rtol=1e-6, atol=0)


def test_adamw_weight_decay_of_a_made_group_is_refused(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), adamw_weight_decay=0.01)
    optimizer.param_groups[1]["adamw_weight_decay"] = 0.02
    with pytest.raises(ValueError, match=r"adamw_weight_decay=0\.02 .* do nothing: write weight_decay in AdamW's"):
        take_steps(optimizer, params, [0])


def test_a_factor_is_refused_for_matrices(kernel):
    group = {"params": [Parameter(torch.ones(8, 8))], "lr_factor": 0.5}
    with pytest.raises(ValueError, match=r"lr_factor=0\.5 is for groups that AdamW updates: in Muon's groups write lr"):
        kernel.Muon([group])
    optimizer = kernel.Muon(named_parameters().items())
    with pytest.raises(ValueError, match=r"lr_factor=0\.5 is for groups that AdamW updates"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 2


def test_adamw_lr_of_a_made_group_is_refused(kernel):
    """It has become `lr_factor`; a later one would do nothing."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02, adamw_lr=0.01)
    take_steps(optimizer, params, [0])
    assert [group["adamw_lr"] for group in optimizer.param_groups] == [None, None]
    optimizer.param_groups[1]["adamw_lr"] = 0.005
    before = {name: p.detach().clone() for name, p in params.items()}
    with pytest.raises(ValueError, match=r"adamw_lr=0\.005 .* would do nothing.* write their lr or lr_factor"):
        take_steps(optimizer, params, [1])
    assert all(torch.equal(p, before[name]) for name, p in params.items())
    optimizer.param_groups[1]["adamw_lr"] = None
    saved = optimizer.state_dict()
    saved["param_groups"][1]["adamw_lr"] = 0.01  # as older versions wrote it
    optimizer.load_state_dict(saved)
    take_steps(optimizer, params, [1])


@pytest.mark.parametrize("lr", [0.5, None])
def test_a_state_from_before_factors_has_absolute_rates(kernel, lr):
    """As format 1 has them, and torch's optimizers; where it says no `lr`, rate and factor stay as they are here."""
    params, others = named_parameters(), named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.5, adamw_lr=0.125)
    take_steps(optimizer, params, range(2))
    old = copy.deepcopy(optimizer.state_dict())
    for group, rate in zip(old["param_groups"], (0.5, 0.125)):
        group.update(lr=rate, state_format=1)
        for key in ("lr_factor",) if lr else ("lr_factor", "lr"):
            del group[key]
    for name, p in params.items():
        others[name].data.copy_(p.data)
    later = kernel.Muon(others.items(), lr=0.5, adamw_lr=0.125)
    later.load_state_dict(old)
    expected = [(0.5, 1.0), (0.125, 1.0)] if lr else [(0.5, 1.0), (0.5, 0.25)]
    assert [(group["lr"], group["lr_factor"]) for group in later.param_groups] == expected
    take_steps(optimizer, params, [2])
    take_steps(later, others, [2])
    assert same_bits(params, others)


@pytest.mark.parametrize(
    "number", [np.float64(0.25), np.float32(0.25), Fraction(1, 4), 1, np.float64(-1e-19)], ids=repr
)
def test_what_a_scheduler_sets_is_saved_as_a_plain_number(kernel, number):
    """NumPy's float64 is a float, too, but no file with one can be loaded safely."""
    optimizer = kernel.Muon(named_parameters().items(), lr=0.1)
    for group in optimizer.param_groups:
        group["lr"] = number
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(group["lr"]) is float and group["lr"] == number for group in loaded["param_groups"])
    other = kernel.Muon(named_parameters().items())
    other.load_state_dict(loaded)  # a rounding error below zero, too
    assert all(group["lr"] == number for group in other.param_groups)


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("decay_mode", ["decoupled", "independent", "cautious", "corrected"])
def test_a_tensor_of_one_element_may_have_any_shape(kernel, fallback, decay_mode):
    """As in torch, also beside one of no dimension in a batch; what a step computes of both has the same bits."""
    results = []
    for shape in ((), (1,), (1, 1)):
        params = {
            **named_parameters(),
            "gate.bias": Parameter(torch.ones(24)),
            "gate.weight": Parameter(torch.ones(24, 12)),
        }
        numbers = dict(lr=torch.full(shape, 0.02), weight_decay=torch.full(shape, 0.1))
        groups = [{"params": [pair], **(numbers if i % 2 else {})} for i, pair in enumerate(params.items())]
        optimizer = kernel.Muon(groups, lr=torch.tensor(0.02), adamw_lr=0.003, decay_mode=decay_mode, fallback=fallback)
        take_steps(optimizer, params, range(2))
        results.append(params)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.parametrize("key", ["lr", "weight_decay", "adamw_lr"])
def test_a_tensor_without_a_value_is_refused(kernel, key):
    words = re.escape("tensor of one element that has a value, got () torch.float32 on meta")
    with pytest.raises(ValueError, match=f"{key} must be .* {words}"):
        kernel.Muon(named_parameters().items(), **{key: torch.tensor(0.1, device="meta")})


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_tensor_on_another_device_is_refused_before_anything_changes(kernel, key):
    """A fake tensor stands for one on a GPU: a step of parameters on the CPU would begin, and fail when it is read."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    before = copy.deepcopy((params, state_of(optimizer, params)))
    last = optimizer.param_groups[-1]
    with FakeTensorMode():
        number, last[key] = last[key], torch.empty((), device="cuda")
    words = f"{key} is a tensor on cuda:0, and parameters of its group are on cpu: put it"
    with pytest.raises(ValueError, match=words):
        take_steps(optimizer, params, [1])
    assert same_bits(params, before[0]) and same_bits(state_of(optimizer, params), before[1])
    last[key] = number
    take_steps(optimizer, params, [1])
    assert not same_bits(params, before[0])


def test_a_number_is_read_from_the_cpu_alone(kernel):
    """To read a number elsewhere would wait for the device; here it cannot be read at all."""
    number_at_hand = kernel.parameters.setting_values.number_at_hand
    elsewhere = torch.empty((), device="meta")
    assert number_at_hand(elsewhere) is elsewhere
    assert number_at_hand(torch.tensor(-1.0)) == number_at_hand(Parameter(torch.tensor([-1.0]))) == -1.0


def test_a_real_number_among_fake_tensors_is_taken_and_checked(kernel):
    """It has a value, though no operation gives it in a fake mode. A fake number has none, and is taken, too."""
    right, wrong = torch.tensor([0.1]), torch.tensor(-0.1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = named_parameters()
        for number in (right, torch.tensor(0.1)):
            optimizer = kernel.Muon(params.items(), lr=number)
            take_steps(optimizer, params, [0])
            assert optimizer.param_groups[0]["lr"] is number
        with pytest.raises(ValueError, match=r"lr must be at least 0 .* got -0\.1"):
            kernel.Muon(params.items(), lr=wrong)


def test_a_number_beside_parameters_of_two_devices_is_refused(kernel):
    check = kernel.parameters.rates.check_live_tensors
    with FakeTensorMode():
        params = [torch.empty(2, device=device) for device in ("cuda", "cpu")]
        number = torch.empty((), device="cuda")
        check({"params": params[:1], "lr": number, "weight_decay": 0.1})
        check({"params": [params[0], torch.empty(2, device="meta")], "lr": number, "weight_decay": 0.1})
        with pytest.raises(ValueError, match="parameters of its group are on cpu, cuda:0"):
            check({"params": params, "lr": number, "weight_decay": 0.1})
