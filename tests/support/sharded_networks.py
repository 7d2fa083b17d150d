"""A small network, under FSDP2 with and without replicas and tensor parallelism, and gradients for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.pieces import mesh_of
from tests.support.sharded_models import bits_equal

# Mesh and whether its second dimension is tensor parallelism's; None for a network that is whole.
NETWORK_LAYOUTS = {
    "fsdp": ((4,), False),
    "fsdp on two ranks": ((2,), False),
    "hsdp": ((2, 2), False),
    "tp and fsdp": ((2, 2), True),
    "one process": None,
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 26)
        self.down = nn.Linear(26, 10, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Network(nn.Module):
    """Three blocks, whose matrices are Muon's and whose biases are AdamW's."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x):
        return self.blocks(x)


def network_on(name: str, device: str, seed: int = 0) -> Network:
    """Return the network that each rank has under a layout of NETWORK_LAYOUTS; its weights are drawn on the CPU."""
    network = Network(seed).to(device)
    if NETWORK_LAYOUTS[name] is None:
        return network
    shape, tensor_parallel = NETWORK_LAYOUTS[name]
    mesh = mesh_of(shape)
    if tensor_parallel:
        for block in network.blocks:
            parallelize_module(block, mesh["y"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["x"]
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


def set_gradients(network: nn.Module, step: int) -> None:
    """Give each parameter the gradient of this step, the same whole one whatever its layout."""
    for number, p in enumerate(network.parameters()):
        gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + number)).to(
            p.device, p.dtype
        )
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = gradient


def assert_same_network(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """All parameters have the same bits."""
    assert one.keys() == other.keys()
    wrong = [name for name, value in one.items() if not bits_equal(value, other[name])]
    assert not wrong, wrong
