"""Parameters on a mesh that some ranks are not in: these hold nothing of them, and say nothing about them in a file."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.backends import read_last_step

NAMES = ("bias", "embeddings", "up")


def network(number: int) -> nn.Module:
    """Return parameters of AdamW and of Muon, with values by `number`, on the second of two ranks alone."""
    mesh, generator = DeviceMesh("cpu", [1]), torch.Generator().manual_seed(number)
    values = (torch.randn(shape, generator=generator) for shape in ((9,), (12, 4), (6, 8)))
    return nn.ParameterDict(
        {
            name: nn.Parameter(distribute_tensor(v, mesh, [Shard(0)], src_data_rank=None))
            for name, v in zip(NAMES, values)
        }
    )


def take_steps(model: nn.Module, optimizer, steps) -> None:
    for step in steps:
        for p in model.parameters():
            value = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            gradient = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = gradient if dist.get_rank() == 1 else None
        optimizer.step()
    optimizer.zero_grad()


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().to_local().clone() for p in model.parameters()]


def resumed(kernel, folder: str, flatten: bool):
    """Return local parts after two steps, a checkpoint and two more in a new optimizer, and after four at a stretch."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    parts = []
    for is_new in (False, True):
        model = network(0)
        optimizer = kernel.Muon(model.named_parameters(), lr=0.02)
        take_steps(model, optimizer, range(2))
        if is_new:
            state = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options)))
            dcp.save(state, checkpoint_id=folder)
            model = network(1)
            optimizer = kernel.Muon(model.named_parameters(), lr=0.02)
            state = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options)))
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
            )
        take_steps(model, optimizer, range(2, 4))
        read_last_step(optimizer)
        parts.append(locals_of(model))
    return parts


@pytest.mark.parametrize("flatten", [False, True])
def test_a_checkpoint_has_the_count_of_steps_of_the_ranks_that_took_them(pools, tmp_path, flatten):
    """The first rank, which writes what all ranks have, has taken none."""
    for new, stretch in pools(2).run(resumed, str(tmp_path), flatten):
        assert all(map(torch.equal, new, stretch))


def with_a_count_for_all(kernel):
    """Load a state that counts steps for each rank, as full_state_dict does; return what a rank has then, and exports.

    The count of a rank without a part of the parameter is dropped.
    """
    model = network(0)
    optimizer = kernel.Muon(model.named_parameters(), lr=0.02)
    take_steps(model, optimizer, range(2))
    saved = optimizer.state_dict()
    for each in saved["state"].values():
        if "exp_avg" in each:
            each["step"] = torch.tensor(2.0)
    optimizer.load_state_dict(saved)
    take_steps(model, optimizer, range(2, 3))
    target = torch.optim.AdamW([model["bias"], model["embeddings"]])
    exported = kernel.export_state(optimizer, target)
    target.load_state_dict(exported)
    counts = [
        float(optimizer.state[p]["step"]) for p in target.param_groups[0]["params"] if "step" in optimizer.state[p]
    ]
    return counts, len(exported["state"])


def test_a_rank_without_a_part_keeps_no_count(pools):
    assert pools(2).run(with_a_count_for_all) == [([], 0), ([3.0, 3.0], 2)]


def moved_by_gradients_on_all_ranks(kernel) -> list[bool]:
    """Whether each parameter moved in a step in which ranks without a part of it have an empty gradient."""
    model = network(0)
    optimizer = kernel.Muon(model.named_parameters(), lr=0.02)
    for p in model.parameters():
        p.grad = distribute_tensor(torch.ones(p.shape), p.device_mesh, p.placements, src_data_rank=None)
    before = locals_of(model)
    optimizer.step()
    return [not torch.equal(one, other) for one, other in zip(before, locals_of(model))]


def test_gradients_without_elements_change_nothing(pools):
    assert pools(2).run(moved_by_gradients_on_all_ranks) == [[False] * len(NAMES), [True] * len(NAMES)]
