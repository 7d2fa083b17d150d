"""Files that lack what their source always has, or have values of another kind, are refused with what is wrong."""

import copy

import pytest
import torch

from tests.support.published_muons import CASES, fresh, keller_jordan_case
from tests.support.small_model import named_parameters


def refused(kernel, state_dict, source, error, words, **others):
    """Import raises `error` with `words`, and changes nothing."""
    _, optimizer = fresh(kernel)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=words):
        kernel.import_state(optimizer, state_dict, source, **others)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for i, state in before["state"].items():
        assert all(torch.equal(value, after["state"][i][key]) for key, value in state.items())


def names_for(source):
    """timm's one group has no branch of its own, so names tell which parameter is which."""
    return {"names": list(named_parameters())} if source == "timm" else {}


@pytest.mark.parametrize(
    "case, number, branch, key",
    [
        ("timm", 0, "adamw", "nesterov"),
        ("timm", 0, "muon", "eps"),
        ("motif", 0, "muon", "momentum"),
        ("moonlight", 0, "muon", "momentum"),
        ("dion", 0, "muon", "mu"),
        ("dion", 0, "muon", "epsilon"),
        ("dion", 0, "muon", "adjust_lr"),
        ("dion", 1, "adamw", "beta1"),
    ],
)
def test_a_group_without_what_its_source_always_has_is_refused(kernel, case, number, branch, key):
    _, state_dict, source, *_ = CASES[case]()
    del state_dict["param_groups"][number][key]
    words = (
        f"^group {number} of the state of source='{source}' has no {key}, which it needs for parameters of {branch}$"
    )
    refused(kernel, state_dict, source, ValueError, words, **names_for(source))


def test_a_file_of_another_source_is_told_by_what_its_groups_lack(kernel):
    _, state_dict, *_ = keller_jordan_case()
    words = "^group 0 of the state of source='timm' has no nesterov, .* it looks like 'keller_jordan'"
    refused(kernel, state_dict, "timm", ValueError, words)


@pytest.mark.parametrize("wrong", [None, "0.9", {}, torch.zeros(3)], ids=str)
@pytest.mark.parametrize(
    "case, key",
    [
        ("torch", "lr"),
        ("motif", "momentum"),
        ("moonlight", "momentum"),
        ("dion", "mu"),
        ("dion", "epsilon"),
        ("timm", "safety_factor"),
    ],
)
def test_a_setting_that_is_no_number_is_refused(kernel, case, key, wrong):
    _, state_dict, source, others, _ = CASES[case]()
    state_dict["param_groups"][0][key] = wrong
    words = f"^{key} of group 0 of the state of source='{source}' must be a number"
    refused(kernel, state_dict, source, (TypeError, ValueError), words, **others, **names_for(source))


def test_a_setting_of_the_adamw_beside_torchs_muon_is_named_by_its_file(kernel):
    _, state_dict, source, others, _ = CASES["torch"]()
    others["adamw_state_dict"]["param_groups"][0]["eps"] = None
    refused(kernel, state_dict, source, TypeError, "^eps of group 0 of adamw_state_dict must be a number", **others)


def test_a_norm_is_not_divided_by_a_safety_of_zero(kernel):
    _, state_dict, source, *_ = CASES["timm"]()
    state_dict["param_groups"][0]["safety_factor"] = 0.0
    refused(kernel, state_dict, source, ValueError, "^safety_factor of group 0 of .* must be above 0, got 0.0")


def test_a_flag_of_several_values_is_refused(kernel):
    _, state_dict, source, *_ = CASES["motif"]()
    state_dict["param_groups"][0]["nesterov"] = torch.zeros(3)
    refused(kernel, state_dict, source, TypeError, r"^nesterov of group 0 of .* must not be a tensor of shape \(3,\)")


def test_a_tensor_under_a_key_of_the_users_own_is_noted(kernel):
    _, state_dict, source, *_ = CASES["motif"]()
    state_dict["param_groups"][0]["mine"] = torch.zeros(3)
    notes = kernel.import_state(fresh(kernel)[1], state_dict, source)
    assert "group 0: mine=tensor([0., 0., 0.]) of the source has no counterpart" in notes


@pytest.mark.parametrize("wrong", [[], {}], ids=str)
def test_a_choice_that_cannot_be_a_key_is_refused_or_noted(kernel, wrong):
    _, state_dict, source, *_ = CASES["moonlight"]()
    state_dict["state"][0]["use_muon"] = wrong
    refused(kernel, state_dict, source, ValueError, "branch of parameters without a name is unclear in the source")
    _, state_dict, source, *_ = CASES["dion"]()
    state_dict["param_groups"][0]["adjust_lr"] = wrong
    notes = kernel.import_state(fresh(kernel)[1], state_dict, source)
    assert f"group 0: adjust_lr={wrong} of the source has no counterpart" in notes


def test_a_state_that_is_no_dict_is_refused(kernel):
    _, state_dict, source, *_ = CASES["motif"]()
    state_dict["state"][0] = 5
    refused(kernel, state_dict, source, TypeError, "^the state of parameter 0 must be a dict, got 5$")


@pytest.mark.parametrize("wrong", [None, "7", {}], ids=str)
@pytest.mark.parametrize("number, name, key", [(0, "up.weight", "momentum_buffer"), (2, "wte.weight", "step")])
def test_a_state_without_a_value_is_refused_by_the_name_of_its_parameter(kernel, number, name, key, wrong):
    _, state_dict, source, *_ = CASES["motif"]()
    state_dict["state"][number][key] = wrong
    words = f"{name} needs tensors as state and a number as step, the source has {key}={wrong!r}$"
    refused(kernel, state_dict, source, ValueError, words)
