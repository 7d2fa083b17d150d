"""Parameters that keep their values in other tensors: Muon needs one, and says so."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor


def two_tensors(**options) -> Parameter:
    return Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)), **options)


def test_several_inner_tensors_are_refused_for_muon(kernel):
    words = r"^up.weight is a TwoTensor, which keeps its values in 2 tensors, a and b: .* or write use_muon=False"
    with pytest.raises(TypeError, match=words):
        kernel.Muon([("up.weight", two_tensors())])
    optimizer = kernel.Muon([("up.weight", Parameter(torch.ones(8, 8)))])
    with pytest.raises(TypeError, match=words.replace("up", "down")):
        optimizer.add_param_group({"params": [("down.weight", two_tensors())]})
    assert len(optimizer.param_groups) == 1


def test_several_inner_tensors_are_updated_by_adamw_as_one_plain_tensor_is(kernel):
    plain, double = Parameter(torch.ones(8, 8)), two_tensors()
    for p in plain, double:
        optimizer = kernel.Muon([{"params": [("up.weight", p)], "use_muon": False}])
        gradient = torch.linspace(-1, 1, 64).view(8, 8)
        p.grad = gradient if p is plain else TwoTensor(gradient, gradient.clone())
        optimizer.step()
    assert torch.equal(double.a, plain) and torch.equal(double.b, plain) and not torch.equal(plain, torch.ones(8, 8))


def test_frozen_ones_are_left_alone(kernel):
    """Such as quantized weights beside a LoRA adapter."""
    frozen, trained = two_tensors(requires_grad=False), Parameter(torch.ones(8, 8))
    optimizer = kernel.Muon([("up.weight", frozen), ("lora.weight", trained)])
    trained.grad = torch.eye(8)
    optimizer.step()
    assert torch.equal(frozen.a, torch.ones(8, 8)) and not torch.equal(trained, torch.ones(8, 8))
