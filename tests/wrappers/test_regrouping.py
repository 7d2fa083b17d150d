"""A state that this package saved in other groups is matched by name, and the groups stay as they are."""

import copy
import re

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.support.small_model import named_parameters, same_bits, serialized, state_of, take_steps

SETTINGS = {"lr": 0.02, "adamw_lr": 0.01, "weight_decay": 0.1}


def halves(params):
    pairs = list(params.items())
    return [{"params": pairs[::2]}, {"params": pairs[1::2]}]


GROUPINGS = {
    "one": lambda params: [{"params": list(params.items())}],
    "reversed": lambda params: [{"params": list(params.items())[::-1]}],
    "halves": halves,
    "each": lambda params: [{"params": [pair]} for pair in params.items()],
}


def in_groups(kernel, grouping, params, **settings):
    return kernel.Muon(GROUPINGS[grouping](params), **{**SETTINGS, **settings})


def stepped(kernel, grouping, steps, **settings):
    params = named_parameters(settings.pop("dtype", torch.float32))
    optimizer = in_groups(kernel, grouping, params, **settings)
    take_steps(optimizer, params, range(steps))
    return params, optimizer


SETTINGS_OF_STATE = [
    {},
    {"momentum_dtype": "int8"},
    {"second_moment": "rows"},
    {"stochastic_rounding": True, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("there, here", [("one", "each"), ("each", "halves"), ("halves", "reversed")])
@pytest.mark.parametrize("settings", SETTINGS_OF_STATE, ids=str)
def test_training_goes_on_as_if_the_groups_had_always_been_so(kernel, there, here, settings):
    straight, _ = stepped(kernel, here, 4, **settings)
    params, saver = stepped(kernel, there, 2, **settings)
    optimizer = in_groups(kernel, here, params, **{key: value for key, value in settings.items() if key != "dtype"})
    assert kernel.import_state(optimizer, serialized(saver.state_dict()), "other_groups") == []
    take_steps(optimizer, params, range(2, 4))
    assert same_bits(params, straight)


def test_settings_of_groups_stay_as_they_are(kernel):
    params, saver = stepped(kernel, "one", 1, lr=0.5)
    optimizer = in_groups(kernel, "each", params, momentum=0.8, adamw_betas=(0.8, 0.9))
    optimizer.param_groups[0]["lr"] = 0.25
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    kernel.import_state(optimizer, saver.state_dict(), "other_groups")
    assert optimizer.state_dict()["param_groups"] == before


def test_a_state_by_name_of_distributed_checkpoints_is_understood(kernel):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    params = dict(model.named_parameters())
    saver, optimizer = in_groups(kernel, "one", params), in_groups(kernel, "each", params)
    take_steps(saver, params, [0])
    saver.zero_grad()
    assert kernel.import_state(optimizer, get_optimizer_state_dict(model, saver), "other_groups") == []
    assert same_bits(state_of(saver, params), state_of(optimizer, params))


def test_a_parameter_of_another_branch_keeps_its_state_here(kernel):
    """Whatever form that of the source has, which is not taken."""
    params, saver = stepped(kernel, "one", 2)
    swapped = {"wte.weight": True, "down.weight": False}
    optimizer = kernel.Muon(
        [
            {"params": [(name, p)], **({"use_muon": swapped[name], "maximize": True} if name in swapped else {})}
            for name, p in params.items()
        ]
    )
    notes = kernel.import_state(optimizer, saver.state_dict(), "other_groups")
    assert notes == [
        "down.weight: Muon's in the source and AdamW's here, so the state stays as it is here",
        "wte.weight: AdamW's in the source and Muon's here, so the state stays as it is here",
    ]
    assert all(not value.any() for name in swapped for value in optimizer.state[params[name]].values())
    others = {name: p for name, p in params.items() if name not in swapped}
    assert same_bits(state_of(optimizer, others), state_of(saver, others))


def test_a_file_without_the_settings_of_newer_versions_has_their_defaults(kernel):
    params, saver = stepped(kernel, "one", 1)
    file, optimizer = saver.state_dict(), in_groups(kernel, "each", params)
    for group in file["param_groups"]:
        for key in ("maximize", "momentum_dtype", "second_moment", "rounding_step"):
            del group[key]
    assert kernel.import_state(optimizer, file, "other_groups") == []
    assert same_bits(state_of(optimizer, params), state_of(saver, params))


def test_a_frozen_parameter_may_be_missing_in_the_source(kernel):
    params, saver = stepped(kernel, "one", 1)
    frozen = torch.nn.Parameter(torch.ones(8, 8), requires_grad=False)
    optimizer = in_groups(kernel, "each", {**params, "frozen.weight": frozen})
    assert kernel.import_state(optimizer, saver.state_dict(), "other_groups") == []
    assert same_bits(state_of(optimizer, params), state_of(saver, params))


def test_names_stand_for_a_file_without_names(kernel):
    params = named_parameters()
    saver = kernel.Muon(list(params.values()), **SETTINGS, is_muon=lambda name, p: p.ndim == 2 and p.shape[0] != 40)
    take_steps(saver, params, [0])
    optimizer = in_groups(kernel, "each", params)
    names = ["up.weight", "down.weight", "wte.weight", "up.bias", "norm.weight"]
    with pytest.raises(ValueError, match=re.escape("5 of 5 parameters of the source have no names")):
        kernel.import_state(optimizer, saver.state_dict(), "other_groups")
    kernel.import_state(optimizer, saver.state_dict(), "other_groups", names=names)
    assert same_bits(state_of(saver, params), state_of(optimizer, params))


def without_a_name(file):
    file["param_groups"][0]["param_names"][0] = "gone.weight"


def of_another_shape(file):
    file["state"][0]["momentum_buffer"] = torch.zeros(24, 13)


def of_a_branch_in_words(file):
    file["param_groups"][0]["use_muon"] = "yes"


def of_a_later_format(file):
    file["param_groups"][1]["state_format"] = 99


REFUSED = {
    "a name": (
        without_a_name,
        {},
        ["gone.weight of the source is not here, or comes twice", "is missing in the source"],
    ),
    "a shape": (of_another_shape, {}, ["momentum_buffer of up.weight has shape (24, 13), needs (24, 12)", "pop(0)"]),
    "a branch": (of_a_branch_in_words, {}, ["use_muon of a saved group must be True or False, got 'yes'"]),
    "a format": (of_a_later_format, {}, ["the state was saved in format 99"]),
    "a sign": (
        None,
        {"maximize": True},
        ["and 2 more: maximize=False in the source and True here. Construct the optimizer with the former"],
    ),
    "moments": (None, {"second_moment": "rows"}, ["up.weight, down.weight: second_moment='none' in the source"]),
}


@pytest.mark.parametrize("change, settings, words", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_before_anything_changes(kernel, change, settings, words):
    params, saver = stepped(kernel, "one", 1)
    optimizer = in_groups(kernel, "each", params, **settings)
    take_steps(optimizer, params, [5])
    before, file = {key: x.clone() for key, x in state_of(optimizer, params).items()}, serialized(saver.state_dict())
    if change is not None:
        change(file)
    with pytest.raises((TypeError, ValueError)) as raised:
        kernel.import_state(optimizer, file, "other_groups")
    assert all(each in str(raised.value) for each in words)
    assert "add_param_group" not in str(raised.value)  # none is new
    assert ("set the latter in the groups after the import" in str(raised.value)) == ("second_moment" in settings)
    assert same_bits(state_of(optimizer, params), before)


def test_each_source_refuses_the_files_of_the_other(kernel):
    params, saver = stepped(kernel, "one", 1)
    adamw = torch.optim.AdamW(params.values())
    adamw.step()
    with pytest.raises(ValueError, match="was not saved by source='other_groups': it looks like 'adamw'"):
        kernel.import_state(saver, adamw.state_dict(), "other_groups")
    with pytest.raises(ValueError, match="this package saved it"):
        kernel.import_state(saver, saver.state_dict(), "adamw")


@pytest.mark.parametrize("there", ["reversed", "each"])
def test_a_load_of_other_groups_says_what_loads_them(kernel, there):
    params, saver = stepped(kernel, "one", 1)
    optimizer = in_groups(kernel, there, params)
    with pytest.raises(ValueError, match=re.escape('call import_state(optimizer, state_dict, "other_groups")')):
        optimizer.load_state_dict(saver.state_dict())


def test_a_parameter_without_state_in_the_source_keeps_its_state_here(kernel):
    params, saver = stepped(kernel, "one", 1)
    optimizer = in_groups(kernel, "each", params)
    take_steps(optimizer, params, [1])
    file, before = saver.state_dict(), optimizer.state[params["up.weight"]]["momentum_buffer"].clone()
    file["state"].pop(0)
    words = ["up.weight: without state in the source, so the state stays as it is here"]
    assert kernel.import_state(optimizer, file, "other_groups") == words
    assert torch.equal(optimizer.state[params["up.weight"]]["momentum_buffer"], before)


def test_state_of_other_packages_is_no_hindrance(kernel):
    params, saver = stepped(kernel, "one", 1)
    saver.state[params["up.weight"]]["of another package"] = torch.zeros(3)
    optimizer = in_groups(kernel, "each", params)
    kernel.import_state(optimizer, saver.state_dict(), "other_groups")
    assert same_bits(state_of(optimizer, params), state_of(saver, params))


@pytest.mark.parametrize("named", [0, 3])
def test_an_optimizer_without_names_is_told_to_take_some(kernel, named):
    """Also for parameters of one group alone."""
    params, saver = stepped(kernel, "one", 1)
    groups = [{"params": pairs} for pairs in (list(params.items())[:named], list(params.values())[named:]) if pairs]
    with pytest.raises(ValueError, match=re.escape("write Muon(model.named_parameters())")):
        kernel.import_state(kernel.Muon(groups), saver.state_dict(), "other_groups")


def test_a_new_parameter_comes_after_the_import(kernel):
    params, saver = stepped(kernel, "one", 1)
    more = {**params, "new.weight": torch.nn.Parameter(torch.ones(8, 8))}
    words = "new.weight is missing in the source\n  Add new parameters after the import, by add_param_group"
    with pytest.raises(ValueError, match=words):
        kernel.import_state(in_groups(kernel, "each", more), saver.state_dict(), "other_groups")


def test_files_of_torch_are_not_sent_to_what_refuses_them(kernel):
    params = {name: p for name, p in named_parameters().items() if name in ("up.weight", "down.weight")}
    muon = torch.optim.Muon(params.items(), lr=0.1)
    take_steps(muon, params, [0])
    with pytest.raises(ValueError, match="saved in another order") as raised:
        kernel.Muon(list(params.items())[::-1]).load_state_dict(muon.state_dict())
    assert "other_groups" not in str(raised.value) and "in the order of the file" in str(raised.value)
