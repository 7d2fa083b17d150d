"""Groups that somebody changes after the optimizer is made: what cannot work raises, and nothing else is mistaken."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, same_bits, set_gradients, state_of, take_steps


def experts_after_a_matrix(kernel):
    """A convolution and a stack of experts of one shape: only names tell them apart."""
    params = {"conv.weight": Parameter(torch.ones(4, 8, 8)), "experts.weight": Parameter(torch.ones(4, 8, 8))}
    return params, kernel.Muon(params.items())


def test_a_parameter_that_gets_the_name_of_another_raises_with_both(kernel):
    """It would be updated as what the other one was, here experts as one 4 x 64 matrix."""
    params, optimizer = experts_after_a_matrix(kernel)
    (group,) = optimizer.param_groups
    del group["params"][0]
    set_gradients(params, 0)
    before = params["experts.weight"].detach().clone()
    with pytest.raises(ValueError, match=r"experts.weight \(4, 8, 8\) would now get the name conv.weight.*param_names"):
        optimizer.step()
    assert torch.equal(params["experts.weight"], before)
    del group["param_names"][0]
    optimizer.step()
    (row,) = optimizer.explain().rows
    assert row.name == "experts.weight" and row.matrices == 4


def test_reordered_parameters_need_reordered_names(kernel):
    _, optimizer = experts_after_a_matrix(kernel)
    (group,) = optimizer.param_groups
    group["params"].reverse()
    with pytest.raises(ValueError, match="param_names"):
        optimizer.explain()
    group["param_names"].reverse()
    assert {row.name: row.matrices for row in optimizer.explain().rows} == {"experts.weight": 4, "conv.weight": 1}


def test_names_may_change_for_all_parameters_at_once(kernel):
    params, optimizer = experts_after_a_matrix(kernel)
    (group,) = optimizer.param_groups
    group["param_names"] = [f"module.{name}" for name in params]
    group["params"].append(Parameter(torch.ones(8, 8)))
    assert [row.name for row in optimizer.explain().rows][:2] == [f"module.{name}" for name in params]


def test_parameters_without_names_may_be_removed_and_added_again(kernel):
    """Their names are made up by their number, and decide nothing."""
    params = [Parameter(torch.ones(8, 8)) for _ in range(3)]
    optimizer = kernel.Muon(params)
    optimizer.explain()
    del optimizer.param_groups[0]["params"][0]
    optimizer.explain()
    optimizer.param_groups.pop(0)
    optimizer.add_param_group({"params": params[:2]})
    assert len(optimizer.explain().rows) == 2


def test_a_replaced_parameter_is_free(kernel):
    """Wrappers replace parameters so that the memory of whole ones is free."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    name = next(name for name, p in params.items() if p is optimizer.param_groups[0]["params"][0])
    replaced = weakref.ref(params[name])
    params[name] = optimizer.param_groups[0]["params"][0] = Parameter(torch.ones_like(params[name]))
    set_gradients(params, 0)
    optimizer.step()
    gc.collect()
    assert replaced() is None


@pytest.mark.parametrize(
    "used",
    [
        copy.deepcopy,
        lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
        lambda opt: opt.load_state_dict(saved(opt)) or opt,
    ],
    ids=["deepcopy", "pickle", "load_state_dict"],
)
def test_a_late_group_is_checked_and_explained_after_copies_and_loads(kernel, used):
    optimizer = used(kernel.Muon(named_parameters().items()))
    before = len(optimizer.param_groups)
    impossible = {"params": [("a.weight", Parameter(torch.ones(8, 64)))], "ns_method": "gram", "ns_dtype": "bfloat16"}
    with pytest.raises(ValueError, match="gram"):
        optimizer.add_param_group(impossible)
    assert len(optimizer.param_groups) == before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.add_param_group({"params": [("b.w", Parameter(torch.ones(8, 16, 12)))]})
    assert any("b.w" in str(warning.message) for warning in caught)


@pytest.mark.filterwarnings("error:.*stacks of matrices")
def test_a_late_group_whose_advice_is_an_error_is_not_added(kernel):
    optimizer = kernel.Muon({"a.weight": Parameter(torch.ones(8, 16))}.items())
    with pytest.raises(UserWarning, match=r"b\.w"):
        optimizer.add_param_group({"params": [("b.w", Parameter(torch.ones(8, 16, 12)))]})
    assert len(optimizer.param_groups) == 1


def test_a_replaced_parameter_keeps_the_reason_for_its_branch(kernel):
    """As after accelerate has sharded a model."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    before = [row.reason for row in optimizer.explain().rows]
    for group in optimizer.param_groups:
        group["params"] = [Parameter(p.detach().clone()) for p in group["params"]]
    assert [row.reason for row in optimizer.explain().rows] == before != ["use_muon"] * len(before)


def test_a_parameter_that_stays_keeps_its_reason_when_one_before_it_goes(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    before = {row.name: row.reason for row in optimizer.explain().rows}
    group = max(optimizer.param_groups, key=lambda group: len(group["params"]))
    assert len({before[name] for name in group["param_names"]}) > 1
    (gone, *_) = group["param_names"]
    del group["params"][0], group["param_names"][0]
    assert {row.name: row.reason for row in optimizer.explain().rows} == {
        name: reason for name, reason in before.items() if name != gone
    }


def test_a_parameter_that_moves_to_a_group_of_its_branch_keeps_its_reason(kernel):
    values = [Parameter(torch.ones(8, 12)) for _ in range(3)]
    groups = [{"params": [("a.weight", values[0]), ("b.weight", values[1])]}]
    optimizer = kernel.Muon([*groups, {"params": [("c.weight", values[2])], "use_muon": True, "role": "hidden"}])
    first, second = optimizer.param_groups
    for key in ("params", "param_names"):
        second[key].append(first[key].pop())
    reasons = {row.name: row.reason for row in optimizer.explain().rows}
    assert reasons == {"a.weight": "matrix", "b.weight": "matrix", "c.weight": "use_muon: hidden"}


def test_a_parameter_that_moves_to_the_next_group_gets_its_rate(kernel):
    """Though all parameters are the same, in the same order."""
    params = {f"{i}.weight": Parameter(torch.ones(8, 12)) for i in range(3)}
    *moving, still = params.items()
    optimizer = kernel.Muon([{"params": moving, "lr": 0.1}, {"params": [still], "lr": 0.0}])
    take_steps(optimizer, params, [0])
    first, second = optimizer.param_groups
    for key in ("params", "param_names"):
        second[key].insert(0, first[key].pop())
    before = copy.deepcopy(params)
    take_steps(optimizer, params, [1])
    assert [torch.equal(p, before[name]) for name, p in params.items()] == [False, True, True]


def saved(optimizer):
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("momentum_dtype", [None, "int8"])
def test_a_group_that_gets_the_other_branch_keeps_no_state_of_the_first(kernel, momentum_dtype):
    """A file with the state of both could not be loaded."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), momentum_dtype=momentum_dtype)
    set_gradients(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["use_muon"] = False
    optimizer.step()
    assert {"momentum_buffer", "momentum_scale"}.isdisjoint(optimizer.state[optimizer.param_groups[0]["params"][0]])
    assert optimizer.explain().rows[0].reason == "use_muon"
    expected = state_of(optimizer, params)
    optimizer.load_state_dict(saved(optimizer))
    assert same_bits(state_of(optimizer, params), expected)


@pytest.mark.parametrize("use_muon, error, words", [(True, ValueError, "lr_factor"), ("yes", TypeError, "use_muon")])
def test_a_branch_that_no_file_could_be_loaded_with_is_refused(kernel, use_muon, error, words):
    """A rate that is a multiple of Muon's is the fallback's."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.1, adamw_lr=0.01, is_muon=lambda name, p: False)
    take_steps(optimizer, params, [0])
    before = copy.deepcopy(params)
    optimizer.param_groups[0]["use_muon"] = use_muon
    with pytest.raises(error, match=words):
        optimizer.step()
    assert same_bits(params, before)


def test_betas_set_later_are_refused(kernel):
    """Nobody would read them; in a new group they are taken for `adamw_betas`."""
    params = named_parameters()
    optimizer = kernel.Muon([{"params": params.items(), "use_muon": False, "betas": (0.9, 0.99)}])
    assert optimizer.param_groups[0]["adamw_betas"] == (0.9, 0.99)
    take_steps(optimizer, params, [0])
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    with pytest.raises(ValueError, match=r"betas=\(0.5, 0.6\) in a group .* write its adamw_betas"):
        optimizer.step()


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_overflow_on_two_devices_is_one_skipped_step(kernel, fallback):
    """GradScaler adds the flags of devices up, and torch's AdamW skips a step if the sum is 1."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), capturable=True, fallback=fallback)
    take_steps(optimizer, params, [0])
    before = copy.deepcopy((params, state_of(optimizer, params)))
    for p in params.values():
        p.grad = torch.full_like(p, torch.inf)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor([2.0])
    optimizer.step()
    assert same_bits(params, before[0]) and same_bits(state_of(optimizer, params), before[1])


def test_an_empty_group_has_the_branch_that_it_asks_for(kernel):
    """For parameters that a wrapper puts into it later."""
    optimizer = kernel.Muon(named_parameters().items())
    for asked in (True, False, None):
        optimizer.add_param_group({"params": [], "use_muon": asked})
    assert [group["use_muon"] for group in optimizer.param_groups[-3:]] == [True, False, False]


@pytest.mark.parametrize("value, error", [(3.0, TypeError), ("3", TypeError), (None, TypeError), (-1, ValueError)])
@pytest.mark.parametrize("rounds", [False, True])
def test_an_impossible_rounding_step_raises_before_anything_moves(kernel, rounds, value, error):
    """Users set it after ranks disagreed."""
    params = named_parameters(torch.bfloat16)
    optimizer = kernel.Muon(params.items(), stochastic_rounding=rounds)
    take_steps(optimizer, params, [0])
    before = copy.deepcopy({**params, **state_of(optimizer, params)})
    optimizer.param_groups[-1]["rounding_step"] = value
    with pytest.raises(error, match="rounding_step must be"):
        optimizer.step()
    assert same_bits({**params, **state_of(optimizer, params)}, before)
    for group in optimizer.param_groups:
        group["rounding_step"] = np.int64(1)
    take_steps(optimizer, params, [1])
    counts = [group["rounding_step"] for group in optimizer.param_groups]
    assert counts == [1 + rounds] * 2 and set(map(type, counts)) == {int}


@pytest.mark.filterwarnings("error:.*stacks of matrices")
def test_names_of_a_group_that_was_not_added_are_free(kernel):
    """For other parameters, as when a user corrects a list in which two names were swapped."""
    optimizer = kernel.Muon({"a.weight": Parameter(torch.ones(8, 16))}.items())
    late = [Parameter(torch.ones(8, 16, 12)) for _ in range(2)]
    with pytest.raises(UserWarning, match=r"b\.w"):
        optimizer.add_param_group({"params": list(zip(["b.w", "c.w"], late))})
    optimizer.add_param_group({"params": list(zip(["c.w", "b.w"], late)), "stacked": True})
    assert [row.name for row in optimizer.explain().rows] == ["a.weight", "c.w", "b.w"]
