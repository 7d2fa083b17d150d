"""Files that lack what their source always has, or have values of another kind, are refused with what is wrong."""

import copy

import pytest
import torch

from tests.support.published_muons import CASES, MATRICES, fresh, keller_jordan_case
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
        ("moonlight", 0, "muon", "ns_steps"),
        ("moonlight", 0, "adamw", "adamw_betas"),
        ("dion", 0, "muon", "mu"),
        ("dion", 0, "muon", "epsilon"),
        ("dion", 0, "muon", "adjust_lr"),
        ("dion", 1, "adamw", "beta1"),
    ],
)
def test_a_group_without_what_its_source_always_has_is_refused(kernel, case, number, branch, key):
    _, state_dict, source, *_ = CASES[case]()
    del state_dict["param_groups"][number][key]
    need = f"has no {key}, which it needs for parameters of {branch}"
    words = f"^group {number} of the state of source='{source}' {need}(: it looks|$)"
    refused(kernel, state_dict, source, ValueError, words, **names_for(source))


@pytest.mark.parametrize("source, lacking", [("timm", "nesterov"), ("moonlight", "adamw_betas, wd")])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_file_of_no_muon_is_refused_even_before_its_first_step(kernel, kind, source, lacking):
    """It has no state that would not fit, and names stand for the branches that such a file does not have."""
    params = named_parameters()
    if kind is torch.optim.SGD:
        lacking = {"timm": "ns_coefficients, ns_steps, eps", "moonlight": "ns_steps, wd"}[source]
        params = {name: params[name] for name in MATRICES}
    state_dict = kind(params.values(), lr=0.1).state_dict()
    optimizer = kernel.Muon(params.items())
    with pytest.raises(ValueError, match=f"^group 0 of the state of source='{source}' has no .*{lacking}, which"):
        kernel.import_state(optimizer, state_dict, source, names=list(params))


def test_a_file_of_another_source_is_told_by_what_its_groups_lack(kernel):
    _, state_dict, *_ = keller_jordan_case()
    words = "^group 1 of the state of source='timm' has no ns_coefficients, .* it looks like 'keller_jordan'"
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


def test_a_file_of_no_adamw_beside_muon_py_is_refused_by_what_it_lacks(kernel):
    _, state_dict, source, *_ = CASES["keller_jordan of matrices alone"]()
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3)) for _ in range(3)], lr=0.1).state_dict()
    words = "^group 0 of adamw_state_dict has no betas, which it needs for parameters of adamw$"
    refused(kernel, state_dict, source, ValueError, words, adamw_state_dict=sgd)


def test_nobody_is_told_to_try_the_source_that_was_tried(kernel):
    """A file of matrices alone has nothing by which its source is known."""
    _, state_dict, source, *_ = CASES["keller_jordan of matrices alone"]()
    words = r"up.weight is \(24, 12\) here, its momentum_buffer in the source \(2, 3\)"
    words = rf"^the state does not fit:\n  {words}\n  the source has no names, so its order counted: pass [^\n]*$"
    state_dict["state"][0]["momentum_buffer"] = torch.zeros(2, 3)
    refused(kernel, state_dict, source, ValueError, words)


def test_a_norm_is_not_divided_by_a_safety_of_zero(kernel):
    _, state_dict, source, *_ = CASES["timm"]()
    state_dict["param_groups"][0]["safety_factor"] = 0.0
    refused(kernel, state_dict, source, ValueError, "^safety_factor of group 0 of .* must be above 0, got 0.0")


def test_a_flag_of_several_values_is_refused(kernel):
    _, state_dict, source, *_ = CASES["motif"]()
    state_dict["param_groups"][0]["nesterov"] = torch.zeros(3)
    refused(kernel, state_dict, source, TypeError, r"^nesterov of group 0 of .* must not be a tensor of shape \(3,\)")


@pytest.mark.parametrize("key", ["use_fallback", "nesterov", "eps", "ns_steps"])
def test_a_setting_without_a_value_is_refused(kernel, key):
    _, state_dict, source, *_ = CASES["timm"]()
    state_dict["param_groups"][0][key] = torch.zeros((), device="meta")
    words = rf"^{key} of group 0 of .* must (not be a tensor of shape \(\)|be a number.* got \(\).*) on meta"
    refused(kernel, state_dict, source, (TypeError, ValueError), words, **names_for(source))


def test_a_choice_of_several_values_is_refused(kernel):
    _, state_dict, source, *_ = CASES["timm"]()
    state_dict["param_groups"][0]["use_fallback"] = torch.zeros(3)
    refused(
        kernel, state_dict, source, TypeError, r"^use_fallback of group 0 of .* must not be a tensor of shape \(3,\)"
    )


def test_names_in_a_tensor_are_refused(kernel):
    _, state_dict, source, *_ = CASES["timm"]()
    for names in (torch.zeros(5), torch.zeros(5, device="meta"), torch.zeros(())):
        refused(kernel, state_dict, source, TypeError, "^names must be a list of the names", names=names)


@pytest.mark.parametrize("key", ["names", "param_names"])
@pytest.mark.parametrize("wrong", [5, "up.weight", [1.0] * 5, torch.zeros(())], ids=str)
def test_names_in_a_file_are_lists_of_texts(kernel, key, wrong):
    _, state_dict, source, *_ = CASES["timm"]()
    state_dict["param_groups"][0][key] = wrong
    refused(kernel, state_dict, source, TypeError, f"^{key} of .* must be a list")
    state_dict["param_groups"][0][key] = ["up.weight"]
    refused(kernel, state_dict, source, ValueError, f"^{key} of group 0 .* a name for each of its 5 parameters, got 1$")


def test_names_beside_those_in_place_of_positions_do_not_matter(kernel):
    """In a distributed checkpoint of a pipeline they may be of another stage."""
    params = named_parameters()
    adamw = torch.optim.AdamW(params.values())
    saved = adamw.state_dict()
    saved["param_groups"][0].update(params=list(params), param_names=["of.another.stage"] * 7)
    kernel.import_state(kernel.Muon(params.items()), saved, "adamw")


@pytest.mark.parametrize("wrong", [True, 7j, torch.tensor(7j), torch.tensor(True)], ids=str)
def test_a_count_that_is_no_real_number_is_refused(kernel, wrong):
    _, state_dict, source, *_ = CASES["motif"]()
    state_dict["state"][2]["step"] = wrong
    words = r"wte\.weight needs tensors as state and a number as step, the source has step="
    refused(kernel, state_dict, source, ValueError, words)


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


def test_a_state_that_lacks_a_part_is_not_mended_by_removing_another(kernel):
    _, state_dict, source, *_ = CASES["timm"]()
    state_dict["state"][2]["max_exp_avg_sq"] = state_dict["state"][2].pop("exp_avg_sq")
    words = "up.bias needs the state exp_avg, exp_avg_sq, step, got exp_avg, max_exp_avg_sq, step(\n|$)"
    refused(kernel, state_dict, source, ValueError, words, **names_for(source))


def test_a_file_of_no_step_fits_second_moments(kernel):
    """Which its source would lack after a step; here all begins anew, with the settings of the source."""
    _, state_dict, source, *_ = CASES["motif"]()
    params, optimizer = fresh(kernel, second_moment="rows")
    kernel.import_state(optimizer, {**state_dict, "state": {}}, source)
    assert not any(optimizer.state[p] for p in params.values())
    assert optimizer.param_groups[0]["lr"] == state_dict["param_groups"][0]["lr"]
