"""What `import_state` says of files of torch.optim.Adam and AdamW that mean something else, or that lack something."""

import copy

import pytest
import torch

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
