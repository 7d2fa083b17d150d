"""Convolutions whose parts lie in memory otherwise than their DTensor says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.sharded_models import one_thread

PLACEMENTS = {"replicated": Replicate(), "rows": Shard(0), "columns": Shard(1)}
SETTINGS = {"plain": {}, "second moments": {"second_moment": "long_side"}, "8 bits": {"momentum_dtype": "int8"}}
CASES = [(p, s) for p in PLACEMENTS for s in SETTINGS if (p, s) != ("columns", "8 bits")]  # that would cut blocks
SIZES = (8, 6, 3, 3), (6, 8, 1, 1), (8, 1, 3, 3), (8, 6, 1, 3)


def of_step(number: int, size: tuple[int, ...]) -> Tensor:
    """Return the parameter's first value for step 0, and a gradient for others."""
    return torch.randn(size, generator=torch.Generator().manual_seed(number))


def trained(kernel, size, settings, placement=None, resharded=False) -> Tensor:
    """Return what three steps make of a convolution that `distribute_tensor` has cut from one in channels_last."""

    def placed(x: Tensor) -> Tensor:
        last = x.to(memory_format=torch.channels_last)
        return x if placement is None else distribute_tensor(last, mesh, [placement], src_data_rank=0)

    mesh = None if placement is None else DeviceMesh("cpu", list(range(dist.get_world_size())))
    p = nn.Parameter(placed(of_step(0, size)))
    optimizer = kernel.Muon([{"params": [("conv.weight", p)], "use_muon": True}], lr=0.1, **settings)
    for step in range(1, 4):
        p.grad = placed(of_step(step, size))
        optimizer.step()
        if resharded:
            saved = optimizer.state_dict()
            momentum = saved["state"][0]["momentum_buffer"]
            saved["state"][0]["momentum_buffer"] = momentum.redistribute(mesh, [Replicate()]).redistribute(
                mesh, [placement]
            )
            optimizer.load_state_dict(saved)
    return p.detach() if placement is None else p.full_tensor().detach()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("placement, settings", CASES)
def test_parts_of_a_channels_last_convolution_give_the_bits_of_one_process(kernel, pools, placement, settings, size):
    """`distribute_tensor` makes them contiguous, so one process has the whole contiguous, too."""
    case = size, SETTINGS[settings]
    with one_thread():
        alone = trained(kernel, *case)
    assert all(torch.equal(x, alone) for x in pools(2).run(trained, *case, PLACEMENTS[placement]))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_a_rank_without_rows_has_the_order_of_the_others(kernel, pools, settings):
    """Of six rows the last of four ranks gets none."""
    case = (6, 8, 3, 3), settings
    with one_thread():
        alone = trained(kernel, *case)
    assert all(torch.equal(x, alone) for x in pools(4).run(trained, *case, Shard(0)))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_redistributed_state_loads_whatever_its_order_in_memory(kernel, pools, placement, size):
    with one_thread():
        alone = trained(kernel, size, {})
    assert all(torch.equal(x, alone) for x in pools(2).run(trained, size, {}, placement, True))


def last_of_one_position(kernel, placement) -> bool:
    """Return whether three steps give the bits of a contiguous parameter, of parts that stay in channels_last."""
    mesh, size = DeviceMesh("cpu", list(range(dist.get_world_size()))), (6, 8, 1, 1)

    def placed(number: int, memory_format: torch.memory_format) -> Tensor:
        whole = of_step(number, size).to(memory_format=memory_format)
        return distribute_tensor(whole, mesh, [placement], src_data_rank=None)

    results = []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        p = nn.Parameter(placed(0, memory_format))
        optimizer = kernel.Muon([("conv.weight", p)], lr=0.1)
        for step in range(1, 4):
            p.grad = placed(step, memory_format)
            optimizer.step()
        results.append(p.full_tensor().detach())
    return torch.equal(*results)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_a_kernel_of_one_position_has_one_order_in_memory(kernel, pools, placement):
    assert all(pools(2).run(last_of_one_position, placement))
