"""A parameter that one rank has in another way than the others: that is named before anything is sent.

Ranks would take parts for those of other rows or columns, or wait for a message that nobody sends.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.pieces import mesh_of
from tests.support.refusals import error_of

# What the odd rank has otherwise, and what the error must show of it.
DIFFERENT = {
    "the order of ranks": ["on a mesh (2,) (ranks"],
    "the order in memory": ["in memory [0, 1, 2, 3]", "in memory [0, 2, 3, 1]"],
    "the order of its part in memory": ["columns (1, 2, 3)", "columns (2, 3, 1)"],
    "its dtype": ["torch.float32", "torch.bfloat16"],
    "whether it is frozen": ["momentum in torch.float32", "frozen"],
}


def step_of_unlike_parameters(kernel, what: str):
    """Each rank has rows of a convolution, rank 1 in another way; return the error, and whether they stayed."""
    ranks, local, is_trained, size = [0, 1], torch.ones(3, 4, 2, 2), True, {}
    if "part" in what:  # of which what a DTensor says of the whole tells nothing
        size = {"shape": torch.Size((6, 4, 2, 2)), "stride": (16, 4, 2, 1)}
    if dist.get_rank() == 1:
        ranks = ranks[::-1] if what == "the order of ranks" else ranks
        local = local.to(memory_format=torch.channels_last) if "in memory" in what else local
        local = local.bfloat16() if what == "its dtype" else local
        is_trained = what != "whether it is frozen"
    part = DTensor.from_local(local, DeviceMesh("cpu", ranks), [Shard(0)], run_check=False, **size)
    p = nn.Parameter(part, is_trained)
    p.grad = torch.ones_like(p) if is_trained else None
    optimizer = kernel.Muon([("conv.weight", p)], momentum_dtype="float32")  # which does not tell that of a parameter
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    return str(caught.value), bool((p.to_local() == 1).all())


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_one_rank_has_otherwise_is_named(pools, what):
    for error, unmoved in pools(2).run(step_of_unlike_parameters, what):
        assert unmoved and "rank 0 has conv.weight" in error and "rank 1 has conv.weight" in error
        assert all(words in error for words in DIFFERENT[what])


def step_of_two_pairs(kernel) -> str | None:
    """Ranks 0 and 1 share a matrix, and so do 2 and 3, of which rank 3 has another plan; return the error."""
    p = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh_of((2, 2))["y"], [Shard(0)], src_data_rank=None))
    p.grad = torch.ones_like(p)
    return error_of(kernel.Muon([("up.weight", p)], ns_steps=4 if dist.get_rank() == 3 else 5).step)


def test_an_error_names_ranks_by_their_numbers_among_all(pools):
    """Not by their places among those that share a parameter."""
    zero, one, *errors = pools(4).run(step_of_two_pairs)
    assert zero is one is None
    for error in errors:
        assert "rank 2 has up.weight (8, 6): 'ns_steps': 5, rank 3 has up.weight (8, 6): 'ns_steps': 4" in error


def step_in_another_order(kernel) -> str | None:
    params = {"up.weight": torch.ones(8, 6), "up.bias": torch.ones(8)}
    named = [(name, nn.Parameter(distribute_tensor(p, mesh_of((2,)), [Shard(0)]))) for name, p in params.items()]
    for _, p in named:
        p.grad = torch.ones_like(p)
    return error_of(kernel.Muon([{"params": [pair]} for pair in named[:: -1 if dist.get_rank() else 1]]).step)


def test_of_parameters_in_another_order_an_error_has_names_and_shapes_alone(pools):
    """What a matrix and a bias have otherwise is no difference between ranks."""
    for error in pools(2).run(step_in_another_order):
        assert error.endswith("rank 0 has up.weight (8, 6), rank 1 has up.bias (8,)")
