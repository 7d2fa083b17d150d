"""Settings: each does what it says, whose learning rate wins, what is stored is plain, and what is refused."""

import copy
from collections.abc import Sequence
from math import inf, nan

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, same_bits, set_gradients, state_of, take_steps


def test_given_group_dict_is_left_unchanged(kernel):
    group = {"params": list(named_parameters().items()), "lr": 1, "ns_coefficients": [[2.0, -1.5, 0.5]]}
    before = {**group, "params": list(group["params"]), "ns_coefficients": [[2.0, -1.5, 0.5]]}
    kernel.Muon([group])
    assert group == before


def test_stored_settings_are_plain_values(kernel):
    optimizer = kernel.Muon(
        named_parameters().items(),
        lr=np.float64(0.02),
        ns_coefficients=(triple for triple in [[2, -1.5, 0.5]]),
        ns_steps=np.int64(3),
        ns_dtype=torch.bfloat16,
        adamw_betas=[0.9, 0.95],
    )
    for values in (optimizer.defaults, *optimizer.param_groups):
        assert type(values["lr"]) is float and type(values["ns_steps"]) is int
        assert values["ns_coefficients"] == ((2.0, -1.5, 0.5),)
        assert (values["ns_dtype"], values["adamw_betas"]) == ("bfloat16", (0.9, 0.95))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"decay_mode": "corrected"}, "needs a decay_lr"),
        ({"decay_mode": "corrected", "decay_lr": 0.0}, "decay_lr must be above 0"),
        ({"decay_mode": "rows"}, "decay_mode must be one of"),
        ({"second_moment": "columns"}, "second_moment must be one of"),
        ({"second_moment_beta": 2.0}, "second_moment_beta must be at least 0 and below 1"),
        ({"equalize": "aurora"}, "equalize must be one of"),
        ({"experimental_hyperball": "yes"}, "experimental_hyperball must be True or False"),
        ({"master_weights": "float32"}, "master_weights must be one of"),
        ({"momentum_dtype": "int4"}, "momentum_dtype must be"),
        ({"momentum": 2.0}, "momentum must be at least 0 and below 1"),
        ({"fallback": "sgd"}, "fallback must be one of"),
        ({"master_weights": "split", "stochastic_rounding": True}, "nothing to round with master_weights"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused_by_the_next_step_before_anything_changes(kernel, change, message):
    """And when it is taken back, the optimizer goes on."""
    params = named_parameters(torch.bfloat16)
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    before = copy.deepcopy((params, state_of(optimizer, params)))
    last = optimizer.param_groups[-1]
    settings = {key: last[key] for key in change}
    last.update(change)
    with pytest.raises((ValueError, TypeError), match=message):
        take_steps(optimizer, params, [1])
    assert same_bits(params, before[0]) and same_bits(state_of(optimizer, params), before[1])
    last.update(settings)
    take_steps(optimizer, params, [1])
    assert not same_bits(params, before[0])


def test_settings_that_are_changed_become_plain(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    optimizer.param_groups[0].update(
        momentum_dtype=torch.int8, ns_dtype=torch.float32, ns_coefficients=[[2, -1.5, 0.5]]
    )
    take_steps(optimizer, params, [0])
    group = optimizer.state_dict()["param_groups"][0]
    assert (group["momentum_dtype"], group["ns_dtype"]) == ("int8", "float32")
    assert group["ns_coefficients"] == ((2.0, -1.5, 0.5),)
    assert optimizer.state[params["up.weight"]]["momentum_buffer"].dtype == torch.int8


def test_settings_of_a_group_are_live(kernel):
    """As torch's are: what a group says when the step begins counts."""
    changes = dict(momentum=0.5, nesterov=False, eps=1e-3, decay_mode="cautious", maximize=True, ns_steps=3)
    live, fixed = named_parameters(), named_parameters()
    optimizer = kernel.Muon(live.items())
    for group in optimizer.param_groups:
        group.update(changes)
    take_steps(optimizer, live, range(2))
    take_steps(kernel.Muon(fixed.items(), **changes), fixed, range(2))
    assert same_bits(live, fixed)


@pytest.mark.parametrize("ns_dtype", ["float32", torch.float32])
def test_work_dtype_is_live(kernel, ns_dtype):
    params, others = named_parameters(), named_parameters()
    optimizer = kernel.Muon(params.items(), ns_dtype="bfloat16")
    for group in optimizer.param_groups:
        group["ns_dtype"] = ns_dtype
    take_steps(optimizer, params, [0])
    take_steps(kernel.Muon(others.items(), ns_dtype="float32"), others, [0])
    assert same_bits(params, others)


@pytest.mark.parametrize(
    "group, error, words",
    [
        (dict(lr=None), TypeError, "lr must be a number, got None"),
        (dict(lr=True), TypeError, "lr must be a number, got True"),
        (dict(lr=torch.tensor(1.0, dtype=torch.bfloat16)), ValueError, "bfloat16"),
        (dict(nesterov="no"), TypeError, "nesterov must be True or False, got 'no'"),
        (dict(use_muon="no"), TypeError, "use_muon must be True, False or None, got 'no'"),
        (dict(use_muon=True, use_fallback=True), ValueError, "contradict"),
        (dict(param_names=["a"]), ValueError, "1 param_names were given for 2 params"),
        (dict(param_names=["a", "a"]), ValueError, "two parameters are called a"),
        (dict(weight_decay="0.1"), TypeError, "weight_decay must be a number"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_group_settings_are_named(kernel, group, error, words):
    with pytest.raises(error, match=words):
        kernel.Muon([{"params": [Parameter(torch.ones(4, 4)), Parameter(torch.ones(4, 4))], **group}])


@pytest.mark.parametrize("value", ["1", None, True, nan, -inf, *map(torch.tensor, ([0.0, 0.0], -1.0, nan))], ids=str)
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
@pytest.mark.parametrize("number", [0, 1], ids=["Muon's", "AdamW's"])
def test_a_wrong_live_number_is_refused_before_anything_changes(kernel, number, key, value):
    """And the next step goes on with a right one."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    set_gradients(params, 1)
    before = copy.deepcopy(params)
    group = optimizer.param_groups[number]
    group[key], right = value, group[key]
    with pytest.raises((TypeError, ValueError), match=f"^{key} must be "):
        optimizer.step()
    assert same_bits(params, before)
    group[key] = right
    optimizer.step()
    assert not same_bits(params, before)


@pytest.mark.parametrize("type_", [float, torch.tensor], ids=["number", "tensor"])
def test_a_schedule_may_end_just_below_zero(kernel, type_):
    """Some reach 0 by subtraction; a training must not end with that step."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    optimizer.param_groups[0]["lr"] = type_(-1e-19)
    take_steps(optimizer, params, [0])
    optimizer.param_groups[0]["lr"] = -1e-3
    with pytest.raises(ValueError, match=r"lr must be at least 0 .* got -0\.001"):
        take_steps(optimizer, params, [1])


def test_capture_is_refused_where_it_cannot_be_repeated(kernel, monkeypatch):
    """So is a capture that was not asked for; nothing moves then."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    clip = dict(head_dim=6, layers=[("up.weight", "down.weight")], report=print)
    for options, words in (
        (dict(), "only with Muon"),
        (dict(capturable=True, lr=torch.tensor(0.1)), "lr and weight_decay on the CPU"),
        (dict(capturable=True, qk_clip=clip), "cannot call the report"),
    ):
        params = named_parameters()
        optimizer = kernel.Muon(params.items(), **options)
        set_gradients(params, 0)
        before = copy.deepcopy(params)
        with pytest.raises(RuntimeError, match=words):
            optimizer.step(lambda: pytest.fail("a forward pass was captured"))
        assert same_bits(params, before)
    with pytest.raises(ValueError, match="draws new seeds at every step"):
        kernel.Muon(params.items(), capturable=True, stochastic_rounding=True)


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(lr=-1.0), ValueError, "lr must be at least 0"),
        (dict(lr=torch.zeros(2)), ValueError, "lr must be a number or a float32 or float64 tensor of one element"),
        (dict(lr="fast"), TypeError, "lr must be a number"),
        (dict(weight_decay=-0.1), ValueError, "weight_decay"),
        (dict(momentum=1.0), ValueError, "momentum must be at least 0 and below 1"),
        (dict(adamw_betas=(0.9,)), ValueError, "adamw_betas must be two numbers"),
        (dict(adamw_betas=(0.9, 1.0)), ValueError, "adamw_betas"),
        (dict(eps=float("nan")), ValueError, "eps"),
        (dict(ns_steps=0), ValueError, "ns_steps must be at least 1"),
        (dict(ns_coefficients="cubic"), ValueError, "cubic"),
        (dict(adjust_lr_fn="rms"), ValueError, "adjust_lr_fn 'rms' is none of"),
        (dict(ns_dtype="int8"), ValueError, "int8"),
        (dict(ns_dtype="half precision"), ValueError, "half precision"),
        (dict(update_rms=0), ValueError, "update_rms must be above 0, got 0"),
        (dict(update_rms=0.18, adjust_lr_fn="original"), ValueError, r"write update_rms=0\.2"),
        (dict(ns_coefficients="deepseek_v4"), ValueError, "deepseek_v4 has 10 steps: write ns_steps=10, got 5"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_wrong_settings_are_named(kernel, options, error, words):
    with pytest.raises(error, match=words):
        kernel.Muon(named_parameters().items(), **options)


def test_an_update_rms_for_all_leaves_out_groups_that_say_so(kernel):
    """As the error of a group of another `adjust_lr_fn` says."""
    first, second = (list(named_parameters().items())[i : i + 1] for i in (0, 1))
    other = {"params": second, "adjust_lr_fn": "original"}
    with pytest.raises(ValueError, match=r"write update_rms=0\.2, the default, in groups with another one"):
        kernel.Muon([{"params": first}, other], update_rms=0.18)
    groups = kernel.Muon([{"params": first}, {**other, "update_rms": 0.2}], update_rms=0.18).param_groups
    assert [group["update_rms"] for group in groups] == [0.18, 0.2]


@pytest.mark.parametrize("bad", ["int16", torch.uint8, 8])
def test_momentum_of_other_integers_is_refused(kernel, bad):
    with pytest.raises(ValueError, match="momentum_dtype"):
        kernel.Muon([Parameter(torch.ones(8, 8))], momentum_dtype=bad)


def test_momentum_in_8_bits_takes_17_bits_for_two_elements(kernel):
    p = Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
    state = kernel.Muon([p], momentum_dtype=torch.int8).state[p]
    assert sum(value.numel() * value.itemsize for value in state.values()) == p.numel() * (1 + 4 / 64)


class Configured(Sequence):
    """A sequence that is neither a list nor a tuple, as OmegaConf's and Hydra's."""

    def __init__(self, *items):
        self._items = items

    def __getitem__(self, i):
        return self._items[i]

    def __len__(self):
        return len(self._items)


def test_sequences_of_configurations_are_sequences(kernel):
    pairs = [("moe.bank.w", Parameter(torch.ones(4, 8, 8))), ("qkv.weight", Parameter(torch.ones(24, 8)))]
    groups = [{"params": pairs[:1]}, {"params": pairs[1:], "split_rows": Configured(8, np.int64(8), 8)}]
    triples = Configured(Configured(2, -1.5, 0.5))
    betas = Configured(np.float32(0.5), 0.75)
    optimizer = kernel.Muon(groups, adamw_betas=betas, expert_keys=Configured("bank"), ns_coefficients=triples)
    first, second = optimizer.param_groups
    assert (first["adamw_betas"], first["expert_keys"]) == ((0.5, 0.75), ("bank",))
    assert (first["ns_coefficients"], second["split_rows"]) == (((2.0, -1.5, 0.5),), (8, 8, 8))
    assert [row.matrices for row in optimizer.explain().rows] == [4, 3]


@pytest.mark.parametrize("key", ["adamw_betas", "expert_keys", "split_rows"])
@pytest.mark.parametrize("text", ["ab", b"ab"])
def test_a_string_is_no_sequence(kernel, key, text):
    with pytest.raises((TypeError, ValueError), match=f"{key} must be .*ab"):
        kernel.Muon([{"params": named_parameters().items(), key: text}])
