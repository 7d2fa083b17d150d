"""What `import_state` says of files that mean something else, lack something, or lose something."""

import copy

import pytest
import torch

from tests.support.published_muons import fresh, keller_jordan_case, torch_case
from tests.support.small_model import named_parameters, take_steps


def notes_on(kernel, source, **settings):
    params = named_parameters()
    adam = source(params.values(), **settings)
    take_steps(adam, params, [0])
    return kernel.import_state(kernel.Muon(copy.deepcopy(params).items()), adam.state_dict(), "adamw")


@pytest.mark.parametrize(
    "source, decay, told",
    [(torch.optim.Adam, 0.1, True), (torch.optim.Adam, 0.0, False), (torch.optim.AdamW, 0.1, False)],
)
def test_decay_that_goes_into_the_gradient_is_told(kernel, source, decay, told):
    """Here it does not: Adam with decay is another optimizer, and without it is AdamW."""
    said = [note for note in notes_on(kernel, source, weight_decay=decay) if "decoupled" in note]
    words = "decay of gradients, decoupled_weight_decay=False of the source has no counterpart"
    assert bool(said) == told and all(note.endswith(words) for note in said)


def test_parameters_without_a_state_in_the_file_are_told(kernel):
    """Theirs becomes new, whatever it was."""
    params = named_parameters()
    adamw = torch.optim.AdamW(params.values())
    take_steps(adamw, params, [0])
    file, optimizer = adamw.state_dict(), kernel.Muon(copy.deepcopy(params).items())
    del file["state"][list(params).index("up.bias")]
    assert "the source has no state of up.bias: it starts anew" in kernel.import_state(optimizer, file, "adamw")
    assert not any("anew" in note for note in notes_on(kernel, torch.optim.AdamW))


def test_nothing_is_noted_of_what_says_how_a_step_is_computed(kernel):
    """DeepSpeed's groups have names and a way to iterate, those of its FusedAdam its steps; torch's Muon has addmm."""
    _, state_dict, source, _, _ = keller_jordan_case()
    rest, muon = state_dict["param_groups"]
    muon.update(name="muon", ns_method="gram")
    rest.update(name="adam", bias_correction=True, step=7)
    assert kernel.import_state(fresh(kernel)[1], state_dict, source) == []
    rest["bias_correction"] = False
    (note,) = kernel.import_state(fresh(kernel)[1], state_dict, source)
    assert note == "group 1: bias_correction=False of the source has no counterpart"
    _, state_dict, source, others, _ = torch_case()
    state_dict["param_groups"][0]["use_addmm"] = True
    assert kernel.import_state(fresh(kernel)[1], state_dict, source, **others) == []


@pytest.mark.parametrize("settings, told", [({}, True), ({"master_weights": "split"}, False)], ids=str)
def test_averages_that_the_dtype_of_their_parameters_rounds_are_told(kernel, settings, told):
    """As where float32 weights were trained, and bfloat16 ones go on. Momentum keeps its dtype."""
    params = named_parameters()
    adamw = torch.optim.AdamW(params.items())
    take_steps(adamw, params, [0])
    halves = {name: torch.nn.Parameter(p.detach().bfloat16()) for name, p in params.items()}
    notes = kernel.import_state(kernel.Muon(halves.items(), **settings), adamw.state_dict(), "adamw")
    words = "averages of wte.weight, up.bias, norm.weight are torch.float32 in the source, and torch.bfloat16 here"
    assert any(note.startswith(words) for note in notes) == told
    assert any("averages" in note for note in notes) == told
