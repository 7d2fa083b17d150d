"""Groups of a saved state: tensors that groups share, names that decide which state is whose, and lost settings."""

import copy
import warnings

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, take_steps


def test_groups_that_share_a_tensor_take_unlike_numbers(kernel):
    optimizer = kernel.Muon(named_parameters().items(), lr=torch.tensor(0.02))
    saved = copy.deepcopy(optimizer.state_dict())
    first, second = saved["param_groups"]
    first["lr"], second["lr"] = torch.tensor(0.5), torch.tensor(0.25)
    optimizer.load_state_dict(saved)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]


def test_equal_tensors_that_are_not_shared_stay_apart(kernel):
    groups = [{"params": [pair], "lr": torch.tensor(0.02)} for pair in named_parameters().items()]
    optimizer = kernel.Muon(groups)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"].fill_(0.5)
    assert [float(group["lr"]) for group in optimizer.param_groups[1:]] == pytest.approx([0.02] * (len(groups) - 1))


def test_names_that_only_begin_as_made_up_ones_are_compared(kernel):
    params = {f"param_{i}.weight": Parameter(torch.ones(8, 8) + i) for i in range(2)}
    saved = kernel.Muon(params.items()).state_dict()
    words = "saved in another order: param_1.weight was parameter 1 of group 0, and is 0 of group 0 here"
    with pytest.raises(ValueError, match=words):
        kernel.Muon(reversed(list(params.items()))).load_state_dict(saved)


def test_a_named_group_whose_settings_are_lost_is_refused(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    last = saved["param_groups"][-1]
    saved["param_groups"][-1] = {key: last[key] for key in ("params", "param_names")}
    with pytest.raises(ValueError, match="no settings for the group of"):
        optimizer.load_state_dict(saved)


def test_the_same_parameters_in_other_groups_are_refused(kernel):
    params = named_parameters()
    saved = kernel.Muon(params.items()).state_dict()
    other = kernel.Muon([{"params": [pair]} for pair in params.items()])
    with pytest.raises(ValueError, match="same parameters in other groups: call import_state"):
        other.load_state_dict(saved)


def test_corrected_decay_without_its_rate_is_refused(kernel):
    """As in a file that somebody has edited. The next step could not decay."""
    optimizer = kernel.Muon(named_parameters().items())
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["decay_mode"] = "corrected"
    with pytest.raises(ValueError, match="needs a decay_lr"):
        optimizer.load_state_dict(saved)
    assert {group["decay_mode"] for group in optimizer.param_groups} == {"decoupled"}
    for group in saved["param_groups"]:
        group["decay_lr"] = 0.02
    optimizer.load_state_dict(saved)


def test_settings_that_a_file_replaces_are_a_warning_before_anything_changes(kernel):
    params = named_parameters()
    resumed = kernel.Muon(params.items(), momentum_dtype="bfloat16", nesterov=False, lr=0.5, weight_decay=0.5)
    before = copy.deepcopy(resumed.state_dict()["param_groups"])
    saved = kernel.Muon(params.items()).state_dict()
    words = r"settings replace .*: nesterov=True instead of False, momentum_dtype=None instead of 'bfloat16'\. To keep"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=words):
            resumed.load_state_dict(saved)
    assert resumed.state_dict()["param_groups"] == before
    with pytest.warns(UserWarning, match=words) as raised:
        resumed.load_state_dict(saved)
    assert len(raised) == 1 and raised[0].filename == __file__
    assert all(group["nesterov"] and group["momentum_dtype"] is None for group in resumed.param_groups)


def test_a_setting_in_another_form_is_the_same(kernel):
    params = named_parameters()
    saved = kernel.Muon(params.items(), momentum_dtype="bfloat16", ns_dtype=torch.float32).state_dict()
    optimizer = kernel.Muon(params.items())
    for group in optimizer.param_groups:
        group.update(momentum_dtype=torch.bfloat16, ns_dtype="float32", expert_keys=list(group["expert_keys"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(saved)


def test_what_schedulers_change_is_no_news_in_a_file(kernel):
    def trained(steps):
        changed = dict(weight_decay=0.1 * steps, decay_lr=0.1 + steps, adamw_betas=(0.9, 0.9 + 0.01 * steps))
        groups = [{"params": list(params.items()), "decay_mode": "corrected", **changed}]
        optimizer = kernel.Muon(groups, lr=0.1, adamw_lr=0.1)
        optimizer.param_groups[1]["lr_factor"] = 1 / (1 + steps)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)  # cycles momentum, too
        for seed in range(steps):
            take_steps(optimizer, params, [seed])
            scheduler.step()
        return optimizer

    params = named_parameters()
    saved = trained(3).state_dict()
    resumed = trained(0)
    assert saved["param_groups"][0]["momentum"] != resumed.param_groups[0]["momentum"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(saved)


def test_a_file_of_torchs_muon_brings_its_settings_without_a_warning(kernel):
    """Its settings are why it is loaded: another optimizer's run goes on."""
    p = Parameter(torch.randn(8, 8))
    source = torch.optim.Muon([p], nesterov=False)
    optimizer = kernel.Muon([("w", p)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(source.state_dict())
        kernel.import_state(kernel.Muon([("w", p)]), source.state_dict())
    assert not optimizer.param_groups[0]["nesterov"]


def test_rates_of_another_unit_stay_where_norms_are_kept(kernel):
    """Also that from which a scheduler computes the next ones."""
    theirs, ours = (Parameter(torch.ones(8, 6)) for _ in range(2))
    other = torch.optim.Muon([theirs], lr=0.5)
    optimizer = kernel.Muon([("up.weight", ours)], lr=0.01, experimental_hyperball=True)
    for each in (other, optimizer):
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1.0)
    theirs.grad = torch.ones(8, 6)
    other.step()
    optimizer.load_state_dict(other.state_dict())
    (group,) = optimizer.param_groups
    assert (group["lr"], group["initial_lr"]) == (0.01, 0.01)


def test_saving_and_loading_leave_no_hooks_behind(kernel):
    """Else each save would do the work of all saves before it."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    names = "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks"
    hooks = [getattr(optimizer, name) for name in (*names, "_optimizer_load_state_dict_post_hooks")]
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert not any(hooks)
