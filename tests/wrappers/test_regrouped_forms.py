"""State of another form, imported into other groups: 8-bit momentum, lower halves, and what a checkpoint has read."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.support.small_model import same_bits, state_of, take_steps
from tests.wrappers.test_regrouping import SETTINGS, in_groups, stepped


def test_momentum_is_converted_to_eight_bits_as_in_a_load(kernel):
    params, saver = stepped(kernel, "one", 2)
    loaded, imported = (in_groups(kernel, each, params) for each in ("one", "each"))
    for optimizer in (loaded, imported):
        for group in optimizer.param_groups:
            group["momentum_dtype"] = "int8"
    saved = saver.state_dict()
    kernel.import_state(imported, saved, "other_groups")
    for group in saved["param_groups"]:
        group["momentum_dtype"] = "int8"
    loaded.load_state_dict(saved)
    assert same_bits(state_of(loaded, params), state_of(imported, params))


def test_lower_halves_of_weights_come_along_whatever_the_branch(kernel):
    params, saver = stepped(kernel, "one", 2, dtype=torch.bfloat16, master_weights="split")
    groups = [{"params": [pair], "use_muon": pair[0] == "wte.weight"} for pair in params.items()]
    optimizer = kernel.Muon(groups, **SETTINGS, master_weights="split")
    kernel.import_state(optimizer, saver.state_dict(), "other_groups")
    assert same_bits(optimizer.master_weights(), saver.master_weights())
    assert any(value.any() for name, value in state_of(saver, params).items() if name.endswith("/remainder"))


def test_a_frozen_parameter_of_another_branch_stays_without_state(kernel):
    """Its lower half alone is no state that could be loaded."""
    params, saver = stepped(kernel, "one", 1, dtype=torch.bfloat16, master_weights="split")
    saver.zero_grad()
    frozen = params["up.weight"].requires_grad_(False)
    groups = [{"params": [pair], "use_muon": pair[0] == "down.weight"} for pair in params.items()]
    optimizer = kernel.Muon(groups, **SETTINGS, master_weights="split")
    kernel.import_state(optimizer, saver.state_dict(), "other_groups")
    assert not optimizer.state.get(frozen)


def test_lower_halves_that_are_here_stay_if_the_source_has_none(kernel):
    params, saver = stepped(kernel, "one", 1, dtype=torch.bfloat16)
    optimizer = in_groups(kernel, "each", params, master_weights="split")
    take_steps(optimizer, params, [1])
    before = {name: value.clone() for name, value in optimizer.master_weights().items()}
    kernel.import_state(optimizer, saver.state_dict(), "other_groups")
    assert same_bits(optimizer.master_weights(), before)


@pytest.mark.parametrize(
    "there, words",
    [
        ({"master_weights": "split"}, "was saved with master_weights='split'"),
        ({"momentum_dtype": "float32"}, "is rounded"),
    ],
    ids=str,
)
def test_what_a_checkpoint_could_not_read_is_said(kernel, tmp_path, there, words):
    """`dcp.load` reads what the optimizer has, in its dtype."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)).bfloat16()
    params = dict(model.named_parameters())
    saver, optimizer = in_groups(kernel, "one", params, **there), in_groups(kernel, "reversed", params)
    take_steps(saver, params, [0])
    saver.zero_grad()
    dcp.save(get_optimizer_state_dict(model, saver), checkpoint_id=tmp_path, no_dist=True)
    file = get_optimizer_state_dict(model, optimizer)
    dcp.load(file, checkpoint_id=tmp_path, no_dist=True)
    try:
        said = str(kernel.import_state(optimizer, file, "other_groups"))
    except ValueError as error:
        said = str(error)
    assert words in said


def test_codes_of_eight_bits_need_a_group_that_has_them(kernel):
    params, saver = stepped(kernel, "one", 1, momentum_dtype="int8")
    words = "up.weight, down.weight: momentum_dtype='int8' in the source and None here. Construct the optimizer with"
    with pytest.raises(ValueError, match=words):
        kernel.import_state(in_groups(kernel, "each", params), saver.state_dict(), "other_groups")


def test_nothing_is_said_of_momentum_that_no_checkpoint_has_read(kernel):
    """That of bfloat16 parameters, which is bfloat16 in the file already, beside float32 parameters."""
    params, saver = stepped(kernel, "one", 1, dtype=torch.bfloat16)
    wide = {name: torch.nn.Parameter(p.detach().float()) for name, p in params.items()}
    optimizer = in_groups(kernel, "each", wide, momentum_dtype="bfloat16")
    assert kernel.import_state(optimizer, saver.state_dict(), "other_groups") == []
