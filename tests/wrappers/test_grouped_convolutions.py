"""Each group of a grouped convolution is a matrix: the step is that of as many convolutions of one group."""

import pytest
import torch
from torch import nn

from tests.support.model_of_many_kinds import chosen

KINDS = {"forward": nn.Conv2d, "transposed": nn.ConvTranspose1d}


def grouped(kind: str, groups: int = 3) -> nn.Module:
    """A convolution of 8 channels for each group, in and out, with a gradient."""
    torch.manual_seed(0)
    module = KINDS[kind](8 * groups, 8 * groups, 3, groups=groups, bias=False)
    module.weight.grad = torch.randn_like(module.weight)
    return module


def alone(module: nn.Module) -> list[nn.Parameter]:
    """The weights of as many convolutions as `module` has groups, with their gradients."""
    parts = []
    for weight, gradient in zip(module.weight.chunk(module.groups), module.weight.grad.chunk(module.groups)):
        parts.append(nn.Parameter(weight.detach().clone()))
        parts[-1].grad = gradient.clone()
    return parts


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_each_group_alone(kernel, kind):
    module = grouped(kind)
    parts = alone(module)
    kernel.Muon(kernel.groups_for(nn.ModuleDict({"body": module, "head": nn.Linear(8, 2)}))).step()
    kernel.Muon([{"params": [(f"{i}.conv.weight", part) for i, part in enumerate(parts)], "use_muon": True}]).step()
    assert torch.equal(module.weight, torch.cat(parts))


@pytest.mark.parametrize("outputs, cut", [(24, " split 8+8+8"), (12, " split 4+4+4"), (9, "")])
def test_groups_of_at_least_four_rows_are_apart(kernel, outputs, cut):
    """Fewer rows are nearly vectors, so the weight stays one matrix."""
    model = nn.ModuleDict({"body": nn.Conv2d(24, outputs, 3, groups=3), "head": nn.Linear(8, 2)})
    assert chosen(kernel.groups_for(model))["body.weight"] == f"convolution: flatten {outputs}x72{cut}"


def test_other_tensors_of_a_convolution_are_not_cut(kernel):
    """Such as the factors of a weight."""
    body = nn.Conv2d(24, 24, 3, groups=3)
    body.factor = nn.Parameter(torch.ones(16, 5, 3))
    model = nn.ModuleDict({"body": body, "head": nn.Linear(8, 2)})
    assert chosen(kernel.groups_for(model))["body.factor"] == "convolution: flatten 16x15"
