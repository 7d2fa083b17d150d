"""A gradient that lies otherwise than its parameter: the line that the error tells to write brings it in line."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SIZE = 8, 6
CASES = ["on another mesh", "plain", "sharded beside a plain parameter"]


def parameter_and_gradient(case: str) -> tuple[nn.Parameter, torch.Tensor]:
    mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    weight, gradient = torch.ones(SIZE), torch.arange(48.0).reshape(SIZE)
    sharded = [distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) for x in (weight, gradient)]
    elsewhere = distribute_tensor(gradient, other, [Replicate(), Shard(0)], src_data_rank=None)
    parameters = dict(zip(CASES, (sharded[0], sharded[0], weight)))
    return nn.Parameter(parameters[case]), dict(zip(CASES, (elsewhere, gradient, sharded[1])))[case]


def step_after_the_advice(kernel, case: str) -> tuple[str, bool]:
    """Return the error, and whether the step after the line that it says gives what the whole gradient gives."""
    p, gradient = parameter_and_gradient(case)
    optimizer = kernel.Muon([("up.weight", p)], lr=0.02)
    p.grad = gradient
    try:
        optimizer.step()
        return "", False
    except ValueError as error:
        text = str(error)
    exec(text.partition("before the step: ")[2], {"p": p, "distribute_tensor": distribute_tensor})
    optimizer.step()
    alone = nn.Parameter(torch.ones(SIZE))
    alone.grad = torch.arange(48.0).reshape(SIZE)
    kernel.Muon([("up.weight", alone)], lr=0.02).step()
    return text, torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, alone)


@pytest.mark.parametrize("case", CASES)
def test_the_line_of_the_error_brings_it_in_line(pools, case):
    for text, is_same in pools(2).run(step_after_the_advice, case):
        assert "its gradient is" in text
        assert is_same, text
