"""Which state of a file without names is whose, and a rate that stays what it was in the file."""

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, set_gradients, take_steps


def test_a_source_may_have_more_groups(kernel):
    params = {f"{i}.weight": Parameter(torch.randn(8, 8)) for i in range(2)}
    source = torch.optim.Muon([{"params": [p]} for p in params.values()])
    take_steps(source, params, [0])
    optimizer = kernel.Muon(params.items())
    kernel.import_state(optimizer, source.state_dict())
    for p in params.values():
        assert torch.equal(optimizer.state[p]["momentum_buffer"], source.state[p]["momentum_buffer"])


def test_matrices_that_keller_jordans_file_has_unsorted_keep_their_order(kernel):
    shapes = {"small.weight": (8, 8), "large.weight": (24, 8)}
    params = {name: Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    momentum = [torch.randn(shape) for shape in shapes.values()]
    group = {"params": [0, 1], "lr": 0.02, "momentum": 0.95, "weight_decay": 0.01, "use_muon": True}
    state = {i: {"momentum_buffer": each} for i, each in enumerate(momentum)}
    optimizer = kernel.Muon(params.items())
    kernel.import_state(optimizer, {"state": state, "param_groups": [group]}, "keller_jordan")
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], each) for p, each in zip(params.values(), momentum))


def test_the_fallback_takes_its_rate_beside_hyperball(kernel):
    params = named_parameters()
    source = torch.optim.AdamW(params.values(), lr=0.5)
    set_gradients(params, 0)
    source.step()
    optimizer = kernel.Muon(params.items(), experimental_hyperball=True)
    kernel.import_state(optimizer, source.state_dict(), source="adamw")
    (rest,) = (group for group in optimizer.param_groups if not group["use_muon"])
    assert rest["lr"] * rest["lr_factor"] == pytest.approx(0.5, rel=4 * 2**-53, abs=0)
