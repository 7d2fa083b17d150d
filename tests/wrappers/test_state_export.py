"""From Muon to torch's optimizers: AdamW's part goes on bit for bit, and matrices begin anew or keep their momentum."""

import copy

import pytest
import torch
from torch.nn import Parameter

from tests.support.published_muons import MATRICES
from tests.support.small_model import named_parameters, same_bits, serialized, set_gradients, state_of, take_steps
from tests.wrappers.test_state_of_adamw import SETTINGS, by_decay, clones, one_group


@pytest.mark.parametrize("make", [one_group, by_decay])
def test_adamw_takes_its_part_back_and_begins_matrices_anew(kernel, make):
    params = named_parameters()
    settings = dict(adamw_lr=0.003, weight_decay=0.2, adamw_betas=(0.85, 0.98), adamw_eps=1e-9)
    optimizer = kernel.Muon(make(params), lr=0.02, **settings)
    take_steps(optimizer, params, range(3))
    others = clones(params)
    adamw = torch.optim.AdamW(make(params), **SETTINGS, fused=True)
    adamw.load_state_dict(serialized(kernel.export_state(optimizer, adamw)))
    matrices = {name: others[name] for name in MATRICES}
    fresh = torch.optim.AdamW(matrices.values(), **SETTINGS, fused=True)
    expected = kernel.Muon(make(others), lr=0.02, **settings)
    expected.load_state_dict(optimizer.state_dict())
    take_steps(adamw, params, range(3, 6))
    for seed in range(3, 6):
        set_gradients(others, seed)
        fresh.step()
        for p in matrices.values():
            p.grad = None
        expected.step()
    assert same_bits(params, others)


def test_torchs_muon_takes_the_matrices(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, range(2))
    muon = torch.optim.Muon([params[name] for name in reversed(MATRICES)], lr=0.5)
    before = copy.deepcopy(state_of(optimizer, params))
    muon.load_state_dict(kernel.export_state(optimizer, muon))
    for name in MATRICES:
        assert torch.equal(muon.state[params[name]]["momentum_buffer"], before[f"{name}/momentum_buffer"])
    assert muon.param_groups[0]["lr"] == 0.5
    take_steps(muon, params, [2])
    assert same_bits(state_of(optimizer, params), before)


def test_steps_of_the_target_do_not_count_here(kernel):
    """torch's AdamW keeps the count that it is given, and adds to it in place."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, range(2))
    before = copy.deepcopy(state_of(optimizer, params))
    adamw = torch.optim.AdamW(params.values())
    adamw.load_state_dict(kernel.export_state(optimizer, adamw))
    take_steps(adamw, params, [2])
    assert same_bits(state_of(optimizer, params), before)


def test_a_frozen_parameter_goes_out_without_a_state(kernel):
    """As matrices do to an AdamW: the target makes one of its own if it comes to that."""
    params = named_parameters()
    params["wte.weight"].requires_grad_(False)
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, {name: p for name, p in params.items() if p.requires_grad}, [0])
    adamw = torch.optim.AdamW(params.values())
    exported = kernel.export_state(optimizer, adamw)
    assert [list(params)[position] for position in exported["state"]] == ["up.bias", "norm.weight"]
    adamw.load_state_dict(exported)
    params["wte.weight"].requires_grad_(True)
    take_steps(adamw, params, [1])
    assert [int(adamw.state[p]["step"]) for p in params.values()] == [1, 1, 2, 1, 2]


@pytest.mark.parametrize(
    "make, options, error, words",
    [
        (lambda params: torch.optim.SGD(params.values()), {}, TypeError, "got Muon and SGD"),
        (lambda params: torch.optim.AdamW([Parameter(torch.ones(3))]), {}, ValueError, r"the first of shape \(3,\)"),
        (lambda params: torch.optim.AdamW(params.values(), amsgrad=True), {}, ValueError, "amsgrad=False"),
        (lambda params: torch.optim.Muon([params["up.weight"]]), {"momentum_dtype": "int8"}, ValueError, "=None"),
    ],
)
def test_target_that_cannot_take_the_state_is_refused(kernel, make, options, error, words):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), **options)
    with pytest.raises(error, match=words):
        kernel.export_state(optimizer, make(params))


def test_momentum_is_converted_before_it_goes_out(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), momentum_dtype="int8")
    take_steps(optimizer, params, range(2))
    for group in optimizer.param_groups:
        group["momentum_dtype"] = None
    exported = kernel.export_state(optimizer, torch.optim.Muon([params["up.weight"]]))
    assert exported["state"][0]["momentum_buffer"].dtype == torch.float32


def test_amsgrad_of_one_group_is_refused(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    groups = [{"params": [p], "amsgrad": i == 1} for i, p in enumerate(params.values())]
    with pytest.raises(ValueError, match="amsgrad=False"):
        kernel.export_state(optimizer, torch.optim.AdamW(groups))
