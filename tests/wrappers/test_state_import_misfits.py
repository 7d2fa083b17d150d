"""State that does not fit is refused with all that is wrong with it, and what is left out is said."""

import copy

import pytest
import torch
from torch.nn import Parameter

from tests.support.published_muons import (
    CASES,
    FOREIGN,
    dion_case,
    fresh,
    moonlight_case,
    motif_case,
    timm_case,
    torch_case,
)
from tests.support.small_model import named_parameters, take_steps


def snapshot(optimizer):
    return copy.deepcopy(optimizer.state_dict())


def same_state(one, other):
    assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
    for i, state in one["state"].items():
        assert all(torch.equal(state[key], other["state"][i][key]) for key in state)


def test_all_misfits_are_listed_at_once(kernel):
    """Nothing is changed."""
    _, state_dict, source, _, _ = timm_case()
    names = ["wte.weight", "up.weight", "up.bias", "gone.weight", "norm.weight"]
    state_dict["state"][0] = {"momentum_buffer": torch.zeros(40, 12), "use_muon": True}
    state_dict["state"][1]["momentum_buffer"] = torch.zeros(24, 13)
    state_dict["state"][2]["max_exp_avg_sq"] = torch.zeros(24)
    params, optimizer = fresh(kernel)
    take_steps(optimizer, params, [0])
    before = snapshot(optimizer)
    with pytest.raises(ValueError) as raised:
        kernel.import_state(optimizer, state_dict, source, names=names)
    same_state(optimizer.state_dict(), before)
    assert str(raised.value).split("\n  ") == [
        "the state does not fit:",
        "gone.weight of the source is not here, or comes twice",
        "wte.weight belongs to muon in the source, and to adamw here",
        "up.weight is (24, 12) here, its momentum_buffer in the source (24, 13)",
        "up.bias needs the state exp_avg, exp_avg_sq, step, got exp_avg, exp_avg_sq, max_exp_avg_sq, step. Nothing "
        "here goes on from max_exp_avg_sq: remove it from the file's state to import the rest",
        "down.weight is missing in the source",
        "names must be in the order of the source: the parameters of its first group, then those of the next",
    ]


def test_names_that_two_modules_share_are_refused(kernel):
    """Two optimizers may have them in another order, and nothing else says which of them is which."""
    modules = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
    adamw = torch.optim.AdamW([{"params": module.named_parameters()} for module in modules])
    for module in modules:
        module.weight.grad = torch.ones(8, 8)
    adamw.step()
    optimizer = kernel.Muon([{"params": module.named_parameters(), "use_muon": True} for module in modules], lr=0.02)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="several parameters are called weight: names have to tell them apart"):
        kernel.import_state(optimizer, adamw.state_dict(), "adamw")
    same_state(optimizer.state_dict(), before)


@pytest.mark.parametrize("count", [1, 3])
def test_wrong_parameter_count_without_names_is_refused(kernel, count):
    _, muon, source, _, _ = torch_case()
    muon["param_groups"][0]["params"] = list(range(count))
    _, optimizer = fresh(kernel)
    with pytest.raises(ValueError, match=rf"has {count} muon parameters .* optimizer 2: up.weight, down.weight"):
        kernel.import_state(optimizer, muon, source)


def test_frozen_parameter_is_not_missed(kernel):
    _, state_dict, source, _, _ = timm_case()
    (group,) = state_dict["param_groups"]
    params = named_parameters(torch.float64)
    params["norm.weight"].requires_grad_(False)
    _, optimizer = fresh(kernel, params)
    kernel.import_state(
        optimizer, {**state_dict, "param_groups": [{**group, "params": [0, 1, 2, 3]}]}, source, names=list(params)[:4]
    )
    assert params["norm.weight"] not in optimizer.state


def test_unrouted_timm_parameter_needs_a_name(kernel):
    _, state_dict, source, _, _ = timm_case()
    del state_dict["state"][1]
    params, optimizer = fresh(kernel)
    with pytest.raises(ValueError, match="branch of parameters without a name is unclear"):
        kernel.import_state(optimizer, state_dict, source)
    take_steps(optimizer, params, [0])
    kernel.import_state(optimizer, state_dict, source, names=list(params))
    optimizer.state_dict()
    assert not optimizer.state[params["up.weight"]]["momentum_buffer"].any()


@pytest.mark.parametrize("spoil", [dict(lr=-1.0), dict(momentum=1.5)], ids=str)
def test_impossible_settings_are_refused(kernel, spoil):
    """Nothing is changed."""
    _, state_dict, source, _, _ = motif_case()
    state_dict["param_groups"][0].update(spoil)
    _, optimizer = fresh(kernel)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=next(iter(spoil))):
        kernel.import_state(optimizer, state_dict, source)
    same_state(optimizer.state_dict(), before)


@pytest.mark.parametrize("case", ["dion with second moments", "torch"])
def test_second_moments_that_do_not_fit_are_refused(kernel, case):
    """Of columns where those of rows are to be, or none where some are wanted. Nothing is changed."""
    _, state_dict, source, others, _ = CASES[case]()
    words = "needs the state momentum_buffer, second_moment, got momentum_buffer: construct .* second_moment='none'"
    if case != "torch":
        state_dict["state"][0]["variance_neuron"] = torch.zeros(1, 12)
        words = r"second_moment of up.weight has shape \(1, 12\), needs \(24, 1\)"
    _, optimizer = fresh(kernel, second_moment="rows")
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=words):
        kernel.import_state(optimizer, state_dict, source, **others)
    same_state(optimizer.state_dict(), before)


def test_settings_not_taken_over_are_noted(kernel):
    _, state_dict, source, _, _ = dion_case()
    muon, rest = state_dict["param_groups"]
    muon.update(adjust_lr=None, params=[0])
    other = {**muon, "params": [1], "lr": 0.5, "cautious_wd": True}
    _, optimizer = fresh(kernel)
    notes = kernel.import_state(optimizer, {**state_dict, "param_groups": [muon, other, rest]}, source)
    assert notes == [
        f"group 0: lr stays {FOREIGN['lr']}, because parameters of this group have 0.01 and 0.5 in the source",
        "group 0: decay_mode stays 'decoupled', because parameters of this group have None and cautious in the source",
        "group 0: adjust_lr=None of the source has no counterpart",
        "group 0: ns_coefficients stays 'polar_express', because the source has none for Muon's matrices",
        "group 0: ns_steps stays 5, because the source has none for Muon's matrices",
    ]
    assert optimizer.param_groups[0]["lr"] == FOREIGN["lr"] and optimizer.param_groups[0]["momentum"] == 0.95


def test_nothing_is_noted_of_a_group_that_is_frozen_as_a_whole(kernel):
    _, state_dict, source, _, _ = dion_case()
    _, optimizer = fresh(kernel)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    optimizer.add_param_group({"params": [("frozen.weight", Parameter(torch.zeros(8, 8), False))]})
    notes = kernel.import_state(optimizer, state_dict, source, names=names)
    assert notes and not any(note.startswith("group 2:") for note in notes)


def test_nothing_is_noted_where_all_is_taken_over(kernel):
    for case in ("torch", "timm", "timm with nadamw", "keller_jordan", "moonlight"):
        _, state_dict, source, others, _ = CASES[case]()
        assert kernel.import_state(fresh(kernel)[1], state_dict, source, **others) == []


def test_wrong_arguments_are_named(kernel):
    _, muon, source, others, _ = torch_case()
    params, optimizer = fresh(kernel)
    with pytest.raises(TypeError, match="got SGD"):
        kernel.import_state(torch.optim.SGD(params.values()), muon, source)
    with pytest.raises(ValueError, match="'adam'"):
        kernel.import_state(optimizer, muon, "adam")
    with pytest.raises(ValueError, match=r"^adamw_state_dict needs a source of torch or keller_jordan, got 'timm'"):
        kernel.import_state(optimizer, muon, "timm", **others)
    with pytest.raises(ValueError, match="got the keys model"):
        kernel.import_state(optimizer, {"model": 1}, source)
    with pytest.raises(ValueError, match="3 names were given for 2 parameters"):
        kernel.import_state(optimizer, muon, source, names=["a", "b", "c"])
    for names in (5, [1, 2], "ab"):
        with pytest.raises(TypeError, match="names must be a list of the names of parameters, got"):
            kernel.import_state(optimizer, muon, source, names=names)
    with pytest.raises(ValueError, match=r"source must be one of .*, got \[\]"):
        kernel.import_state(optimizer, muon, [])


def test_the_rate_that_corrected_decay_is_measured_by_is_noted_where_a_source_brings_another(kernel):
    p = torch.nn.Parameter(torch.ones(12, 20))
    optimizer = kernel.Muon([("w", p)], lr=1e-3, decay_mode="corrected")
    source = torch.optim.Muon([torch.nn.Parameter(torch.ones(12, 20))], lr=0.03)
    notes = kernel.import_state(optimizer, source.state_dict(), "torch")
    assert "decay_lr, which is not in the source, stays 0.001" in " ".join(notes)


def test_decay_and_rates_that_mean_something_else_here_are_not_taken(kernel):
    """Independent decay of torch's default 0.1 would remove a tenth of each parameter in each step."""
    p, q = (torch.nn.Parameter(torch.ones(12, 20)) for _ in range(2))
    source = torch.optim.Muon([q], lr=0.03)
    independent, hyperball = {"decay_mode": "independent"}, {"experimental_hyperball": True}
    for key, theirs, kept, setting in (("weight_decay", 0.1, 1e-4, independent), ("lr", 0.03, 1e-3, hyperball)):
        optimizer = kernel.Muon([("w", p)], **{"lr": 1e-3, "weight_decay": 1e-4, **setting})
        note, new = kernel.import_state(optimizer, source.state_dict(), "torch")
        assert note.startswith(f"group 0: {key}={theirs} of the source is not taken: here ") and "w: it starts" in new
        assert optimizer.param_groups[0][key] == kept
        before, saved = dict(optimizer.param_groups[0]), source.state_dict()
        saved["param_groups"][0]["initial_lr"] = 0.03  # a scheduler's
        optimizer.load_state_dict(saved)  # torch's file is one that fits as it is
        group = optimizer.param_groups[0]
        assert group[key] == kept and ("initial_lr" in group) == (group["lr"] == 0.03)
        assert group["lr_factor"] == before["lr_factor"]


@pytest.mark.parametrize("source", ["timm", "keller_jordan", "adamw"])
def test_a_file_of_this_package_is_refused_under_other_names(kernel, source):
    """Its settings would become the source's: AdamW's ratio 1, other coefficients."""
    optimizer = kernel.Muon(named_parameters().items(), lr=0.02, adamw_lr=0.002)
    with pytest.raises(ValueError, match=r"this package saved it: optimizer\.load_state_dict"):
        kernel.import_state(optimizer, optimizer.state_dict(), source)
    assert optimizer.param_groups[1]["lr_factor"] == pytest.approx(0.1)


@pytest.mark.parametrize("source", ["motif", "keller_jordan", "timm"])
def test_a_file_of_moonlight_is_told_from_those_of_its_relatives(kernel, source):
    """Motif's moments have the same names, and Keller Jordan's and timm's files a `use_muon`, too."""
    _, state_dict, _, _, _ = moonlight_case()
    _, optimizer = fresh(kernel)
    with pytest.raises(ValueError, match="it looks like 'moonlight'"):
        kernel.import_state(optimizer, state_dict, source)
    _, other, _, _, _ = CASES[source]()
    with pytest.raises(ValueError, match=f"it looks like '{source}'"):
        kernel.import_state(optimizer, other, "moonlight")
    for i, state in state_dict["state"].items():  # before the first step
        state_dict["state"][i] = {"use_muon": state["use_muon"]}
    with pytest.raises(ValueError, match="it looks like 'moonlight'"):
        optimizer.load_state_dict(state_dict)
    kernel.import_state(optimizer, state_dict, "moonlight")
    assert not any(value.any() for state in optimizer.state_dict()["state"].values() for value in state.values())


@pytest.mark.parametrize("key", ["wd", "use_muon", "mu"])
def test_a_key_of_the_users_own_does_not_hide_the_source(kernel, key):
    """torch's optimizers keep any key of a group, also those by which files of others are known."""
    params = named_parameters()
    source = torch.optim.AdamW([{"params": list(params.items()), key: False}])
    take_steps(source, params, [0])
    optimizer = kernel.Muon(params.items())
    kernel.import_state(optimizer, source.state_dict(), "adamw")
    assert torch.equal(optimizer.state[params["up.bias"]]["exp_avg"], source.state[params["up.bias"]]["exp_avg"])


def test_names_that_differ_by_a_wrappers_part_alone_find_their_parameters(kernel):
    """PEFT keeps a saved module beside its original; without PEFT's parts both have one name."""
    names = "head.original_module.weight", "head.modules_to_save.default.weight"
    params = {name: Parameter(torch.ones(4, 8)) for name in names}
    source = torch.optim.AdamW(params.items())
    for size, p in enumerate(params.values(), 1):
        p.grad = torch.full_like(p, size)
    source.step()
    optimizer = kernel.Muon(params.items(), is_muon=lambda name, p: False)
    kernel.import_state(optimizer, source.state_dict(), "adamw")
    for p in params.values():
        assert torch.equal(optimizer.state[p]["exp_avg"], source.state[p]["exp_avg"])
