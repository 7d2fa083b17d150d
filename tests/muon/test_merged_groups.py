"""A group with parameters of several groups of a file gets the settings of one from torch, and a load says so."""

import copy
import re
import warnings

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.support.small_model import take_steps

OPTIONS = {
    "by name": StateDictOptions(),
    "whole": StateDictOptions(full_state_dict=True),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
}
WORDS = re.compile(r"the settings of (.*) are now those of (.*) \((.*)\), which the file has in another group: ")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def new_model():
    sizes = {"up": (8, 16), "down": (16, 8)}
    layers = {"embed": nn.Embedding(20, 8), **{name: nn.Linear(*size) for name, size in sizes.items()}}
    return nn.ModuleDict({**layers, "norm": nn.LayerNorm(8)})


def optimizer_of(kernel, model, *apart, last=False, lr=0.02):
    """Give each layer that is `apart` a group of its own, with another rate and decay, before the others or `last`."""
    named = list(model.named_parameters())
    groups = [
        {"params": [pair for pair in named if pair[0].startswith(f"{layer}.")], "lr": 0.03, "weight_decay": 0.3}
        for layer in apart
    ]
    others = {"params": [pair for pair in named if not pair[0].startswith(apart)]} if apart else {"params": named}
    return kernel.Muon([others, *groups] if last else [*groups, others], lr=lr, adamw_lr=0.01)


def load(file, model, optimizer, how, folder=None):
    """Load what `get_optimizer_state_dict` has returned; return what is said of groups, in parts."""
    if folder:
        dcp.save(file, checkpoint_id=folder, no_dist=True)
        file = get_optimizer_state_dict(model, optimizer, options=OPTIONS[how])
        dcp.load(file, checkpoint_id=folder, no_dist=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_optimizer_state_dict(model, optimizer, file, options=OPTIONS[how])
    assert {warning.filename for warning in caught} <= {__file__}
    said = [WORDS.match(str(warning.message)) for warning in caught]
    return [match.groups() for match in said if match]


def saved(kernel, how, *apart, last=False):
    model = new_model()
    optimizer = optimizer_of(kernel, model, *apart, last=last)
    take_steps(optimizer, dict(model.named_parameters()), [0])
    return copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=OPTIONS[how]))


OF_UP = "lr=0.03, lr_factor=1.0, weight_decay=0.3"
REST = "embed.weight, down.bias, norm.weight and 1 more"


@pytest.mark.parametrize(
    "how, expected",
    [
        ("by name", [("down.weight", "up.weight", OF_UP), (REST, "up.bias", OF_UP)]),
        ("flattened", [("down.weight", "up.weight", OF_UP)]),
        ("whole", [("down.weight", "up.weight", OF_UP), (REST, "up.bias", OF_UP)]),
    ],
    ids=list(OPTIONS),
)
def test_settings_of_another_group_are_said_and_are_there(kernel, tmp_path, how, expected):
    """Flattened, AdamW's group gets those of its first parameter, which are as in the constructor."""
    model = new_model()
    optimizer = optimizer_of(kernel, model)
    file = saved(kernel, how, "up", last=how == "whole")
    assert load(file, model, optimizer, how, tmp_path if how != "whole" else None) == expected
    for group, (_, _, settings) in zip(optimizer.param_groups, expected):
        assert {key: group[key] for key in ("lr", "lr_factor", "weight_decay")} == eval(f"dict({settings})")


def test_the_first_parameter_of_a_group_may_be_the_one_whose_settings_count(kernel):
    """With full_state_dict the file's one name is where this optimizer has it, so that names alone show nothing."""
    model = new_model()
    optimizer = optimizer_of(kernel, model)
    said = load(saved(kernel, "whole", "embed", last=True), model, optimizer, "whole")
    assert said == [("up.bias, down.bias, norm.weight and 1 more", "embed.weight", OF_UP)]
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.03]


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("apart", [(), ("up",), ("up", "down")], ids=str)
def test_the_same_groups_say_nothing(kernel, how, apart):
    """A new rate does not count, since a schedule changes it, too."""
    model = new_model()
    optimizer = optimizer_of(kernel, model, *apart, lr=0.05)
    assert load(saved(kernel, how, *apart), model, optimizer, how) == []


@pytest.mark.parametrize("how", OPTIONS)
def test_merged_groups_that_have_the_settings_of_this_optimizer_say_nothing(kernel, how):
    """As where a checkpoint of several stages of a pipeline goes on in one process."""
    model = new_model()
    named = list(model.named_parameters())
    stages = kernel.Muon([{"params": named[:3]}, {"params": named[3:]}], lr=0.02, adamw_lr=0.01)
    take_steps(stages, dict(named), [0])
    file = copy.deepcopy(get_optimizer_state_dict(model, stages, options=OPTIONS[how]))
    assert load(file, model, optimizer_of(kernel, model), how) == []


def test_a_group_that_is_split_says_nothing(kernel):
    """Each part has the settings with which it was saved."""
    model = new_model()
    optimizer = optimizer_of(kernel, model, "up", lr=0.05)
    assert load(saved(kernel, "flattened"), model, optimizer, "flattened") == []
    assert {group["lr"] for group in optimizer.param_groups} == {0.02}


def test_a_parameter_that_the_file_does_not_have_was_in_no_other_group(kernel):
    """It begins anew, in a group of the others, and another warning says that."""
    model = new_model()
    file = saved(kernel, "by name")
    del file["state"]["up.weight"]
    for key in ("params", "param_names"):
        file["param_groups"][0][key].remove("up.weight")
    options = StateDictOptions(strict=False)
    with pytest.warns(UserWarning, match="no state of up.weight") as caught:
        set_optimizer_state_dict(model, optimizer_of(kernel, model, lr=0.05), file, options=options)
    assert len(caught) == 1


@pytest.mark.parametrize("names", [["blocks.7.weight"], ["net.up.weight", "net.down.weight"], ["param_0", "param_1"]])
def test_names_of_none_of_the_parameters_say_nothing(kernel, names):
    """Those of another stage of a pipeline, of a model inside another, and of parameters without names."""
    model = new_model()
    file = saved(kernel, "by name")
    file["param_groups"][0]["param_names"] = names
    assert load(file, model, optimizer_of(kernel, model, lr=0.05), "by name") == []


def test_a_file_that_does_not_count_its_names_is_loaded(kernel):
    """As earlier builds wrote it."""
    model = new_model()
    file = saved(kernel, "whole")
    for group in file["param_groups"]:
        group["sequence_lengths"] = group["sequence_lengths"].partition(", param_names")[0]
    assert load(file, model, optimizer_of(kernel, model, lr=0.05), "whole") == []
