"""A file is read for an optimizer whose state has other parts: the error says which settings to make it with."""

import copy
import itertools
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.support.sharded_models import bits_equal

SETTINGS = {
    "plain": {},
    "moments": {"second_moment": "rows"},
    "8 bits": {"momentum_dtype": "int8"},
    "master weights": {"master_weights": "split"},
}
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
OPTIONS = {"whole": StateDictOptions(full_state_dict=True), "flattened": FLATTENED, "folder": FLATTENED}
ADVICE = r"was saved with .*Construct the optimizer with (.*), load, and then set (.*) in its groups"
# What a file says whose lower halves are all there, and nothing is to be set afterwards.
LOWER_HALVES = r"Load it with bfloat16 parameters and (master_weights='split')()"


def trained(kernel, settings):
    model = nn.Linear(64, 32, dtype=torch.bfloat16)
    optimizer = kernel.Muon(model.named_parameters(), **settings)
    take_step(model, optimizer)
    return model, optimizer


def take_step(model, optimizer):
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).to(p)
    optimizer.step()


def load(file, model, optimizer, how):
    """Load a state dict, or a folder by a planner that reads what it has: by itself torch names what is missing."""
    options = OPTIONS[how]
    if how == "folder":
        state = get_optimizer_state_dict(model, optimizer, options=options)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=file, planner=planner, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state if how == "folder" else copy.deepcopy(file), options=options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("there, here", list(itertools.permutations(SETTINGS, 2)))
def test_a_state_with_other_parts_is_loaded_as_its_error_says(kernel, tmp_path, there, here, how):
    """Or at once, where torch has mixed nothing; either way its values are those that were saved."""
    saved, (model, optimizer) = (trained(kernel, SETTINGS[each]) for each in (there, here))
    expected, before = (copy.deepcopy(each.state_dict()["state"]) for each in (saved[1], optimizer))
    file = copy.deepcopy(get_optimizer_state_dict(*saved, options=OPTIONS[how]))
    if how == "folder":
        dcp.save(file, checkpoint_id=tmp_path, no_dist=True)
        file = tmp_path
    try:
        load(file, model, optimizer, how)
    except ValueError as error:
        if how != "folder":  # dcp.load has written into what was there
            assert same_state(optimizer.state_dict()["state"], before)
        advice = re.search(LOWER_HALVES if "the lower half" in str(error) else ADVICE, str(error))
        needed, wanted = (eval(f"dict({text})") for text in advice.groups())
        optimizer = kernel.Muon(model.named_parameters(), **needed)
        load(file, model, optimizer, how)
        assert same_state(optimizer.state_dict()["state"], expected)
        for group in optimizer.param_groups:
            group.update(wanted)
    else:
        assert how == "whole" and same_state(optimizer.state_dict()["state"], expected)
    take_step(model, optimizer)


def same_state(state, other):
    """Whether two states have the same parts with the same bits."""
    return all(
        state[i].keys() == other[i].keys() and all(bits_equal(part, other[i][key]) for key, part in state[i].items())
        for i in other
    )


def test_parts_of_a_parameter_without_a_state_are_not_missed(kernel):
    """As of a frozen one, whose groups differ all the same."""
    frozen = nn.Linear(64, 32).requires_grad_(False)
    saved = kernel.Muon(frozen.named_parameters(), second_moment="rows").state_dict()
    optimizer = kernel.Muon(frozen.named_parameters(), momentum_dtype="int8")
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["second_moment"] == "rows"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("setting", [{"second_moment": "rows"}, {"momentum_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("branches", ["Muon to AdamW", "AdamW to Muon"])
def test_a_folder_of_another_branch_is_told_by_the_branch(kernel, tmp_path, branches, setting):
    """And not by parts of a setting, which is the same on both sides."""
    model = nn.Linear(64, 32)
    there, here = (
        kernel.Muon(
            model.named_parameters(), is_muon=lambda _, p, branch=branch: p.ndim == 2 and branch == "Muon", **setting
        )
        for branch in branches.split(" to ")
    )
    for optimizer in (there, here):
        take_step(model, optimizer)
    dcp.save(get_optimizer_state_dict(model, there, options=FLATTENED), checkpoint_id=tmp_path, no_dist=True)
    words = "weight.* was saved for {} and belongs to {} here: .*; set use_muon in their group to what was saved"
    with pytest.raises(ValueError, match=words.format(*branches.split(" to "))):
        load(tmp_path, model, here, "folder")


@pytest.mark.parametrize("how", ["by name", "whole", "flattened"])
def test_the_state_of_a_resized_parameter_begins_anew_as_its_error_says(kernel, how):
    """In a dict by name torch misses a state, unless told not to; of a flattened one it takes what has a key."""
    options = OPTIONS.get(how, StateDictOptions())
    models = [nn.ModuleDict({"wte": nn.Embedding(size, 8), "up": nn.Linear(8, 8)}) for size in (40, 44)]
    optimizers = [kernel.Muon(model.named_parameters()) for model in models]
    take_step(models[0], optimizers[0])
    saved = copy.deepcopy(get_optimizer_state_dict(models[0], optimizers[0], options=options))
    with pytest.raises(ValueError) as error:
        set_optimizer_state_dict(models[1], optimizers[1], copy.deepcopy(saved), options=options)
    if how == "flattened":
        key = re.search(r"the keys that start with (\S+) from what get_optimizer_state_dict returns", str(error.value))[
            1
        ]
        new = get_optimizer_state_dict(models[1], optimizers[1], options=options)
        saved.update({each: value for each, value in new.items() if each.startswith(key)})
    else:
        advice = re.search(r"If names are its keys, call (\.pop\(.*?\)), and load with (StateD.*?\))", str(error.value))
        eval(f"saved['state']{advice[1]}")
        options = StateDictOptions(full_state_dict=how == "whole", strict=eval(advice[2]).strict)
    set_optimizer_state_dict(models[1], optimizers[1], saved, options=options)
    take_step(models[1], optimizers[1])
    counts = [optimizers[1].state[p]["step"] for p in (models[1]["wte"].weight, models[1]["up"].bias)]
    assert counts == [1, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("there, here", [("float32", "bfloat16"), (None, "float16"), ("bfloat16", "float32")])
def test_momentum_that_is_rounded_while_it_is_read_is_told_of(kernel, tmp_path, there, here):
    """`dcp.load` copies into what is there. What the warning says loads the bits that were saved, and warns no more."""
    models = [nn.Linear(64, 32, dtype=torch.float32 if there is None else torch.bfloat16) for _ in range(2)]
    optimizers = [kernel.Muon(m.named_parameters(), momentum_dtype=dtype) for m, dtype in zip(models, (there, here))]
    take_step(models[0], optimizers[0])
    dcp.save(get_optimizer_state_dict(models[0], optimizers[0]), checkpoint_id=tmp_path, no_dist=True)

    def warnings_of_load(optimizer):
        state = get_optimizer_state_dict(models[1], optimizer)
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            set_optimizer_state_dict(models[1], optimizer, state)
        return [str(warning.message) for warning in caught if "momentum of" in str(warning.message)]

    said = warnings_of_load(optimizers[1])
    assert len(said) == (here != "float32")  # which holds all values of the other
    if said:
        advice = re.search(rf"weight is torch\.{here}, .* construct the optimizer with (.*)$", said[0])[1]
        other = kernel.Muon(models[1].named_parameters(), **eval(f"dict({advice})"))
        assert not warnings_of_load(other)
        buffers = [o.state[m.weight]["momentum_buffer"] for o, m in ((optimizers[0], models[0]), (other, models[1]))]
        assert bits_equal(*buffers)


def test_momentum_that_a_plain_file_has_was_not_rounded(kernel):
    """It has kept the dtype in which it was made, and will; that is another warning."""
    model = nn.Linear(64, 32)
    optimizer, other = (kernel.Muon(model.named_parameters(), momentum_dtype="bfloat16") for _ in range(2))
    optimizer.param_groups[0]["momentum_dtype"] = None
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].dtype == torch.bfloat16
    with pytest.warns(UserWarning) as caught:
        other.load_state_dict(optimizer.state_dict())
    said = [str(warning.message) for warning in caught]
    assert [text[:30] for text in said] == ["the momentum of weight stays b", "the file's settings replace th"]


@pytest.mark.parametrize("there, here", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_momentum_that_keeps_the_dtype_of_another_model_is_told_of(kernel, there, here):
    """As of a run in half precision that goes on in float32. What the warning says ends it, and so it does in files."""

    def resumed(saved, dtype):
        optimizer = kernel.Muon(nn.Linear(8, 6, dtype=dtype).named_parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.load_state_dict(saved)
        return optimizer, [str(warning.message) for warning in caught]

    saved = kernel.Muon(nn.Linear(8, 6, dtype=there).named_parameters()).state_dict()
    optimizer, (said,) = resumed(saved, here)
    old, new = (str(dtype).removeprefix("torch.") for dtype in (there, here))
    assert said.startswith(f"the momentum of weight stays {old}, because the file has it so and momentum_dtype is None")
    advice = re.search(r"set (momentum_dtype='.*?') in the groups to convert it, or '(.*?)' to keep it", said)
    assert advice[2] == old
    group, (buffer,) = optimizer.param_groups[0], optimizer.state[optimizer.param_groups[0]["params"][0]].values()
    assert buffer.dtype == there
    for settings, dtype in ((eval(f"dict({advice[1]})"), here), ({"momentum_dtype": old}, there)):
        group.update(settings)
        file = optimizer.state_dict()
        assert file["state"][0]["momentum_buffer"].dtype == dtype
        assert "momentum of" not in "".join(resumed(file, here)[1])
    assert new == eval(f"dict({advice[1]})")["momentum_dtype"]
    assert not resumed(saved, there)[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_momentum_that_torch_reads_into_a_models_dtype_is_told_of_as_rounded_alone(kernel, tmp_path):
    """And not that it stays so, though it does."""
    models = [nn.Linear(64, 32) for _ in range(2)]
    optimizers = [kernel.Muon(m.named_parameters(), momentum_dtype=d) for m, d in zip(models, (None, "bfloat16"))]
    state = get_optimizer_state_dict(models[1], optimizers[1])
    dcp.save(get_optimizer_state_dict(models[0], optimizers[0]), checkpoint_id=tmp_path, no_dist=True)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.warns(UserWarning, match="construct the optimizer with momentum_dtype=None$") as caught:
        set_optimizer_state_dict(models[1], optimizers[1], state)
    assert sum("momentum of" in str(warning.message) for warning in caught) == 1
