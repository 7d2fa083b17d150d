"""An optimizer made before `fully_shard` of some blocks has parameters that the model no longer trains: it says so."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.backends import on_every_backend
from tests.support.rank_pool import device_of_ranks


def warned_of(kernel, early: bool) -> list[str]:
    """Shard one of two layers after or before the optimizer is made; return what ten steps warn of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).to(device_of_ranks())
    if not early:
        fully_shard(model[0])
    optimizer = kernel.Muon([(f"layers.{name}", p) for name, p in model.named_parameters()])
    if early:
        fully_shard(model[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            model(torch.ones(4, 8, device=device_of_ranks())).sum().backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if "no gradient" in str(warning.message)]


@on_every_backend()
def test_blocks_that_were_sharded_too_late_are_named(pools):
    for said in pools(2).run(warned_of, True):
        assert len(said) == 1 and said[0].startswith("layers.0.weight: ") and "fully_shard" in said[0]
    assert pools(2).run(warned_of, False) == [[], []]
