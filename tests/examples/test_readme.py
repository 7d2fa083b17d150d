"""The Python of the pages for users runs as it stands there, one block after the other, in a group of one rank."""

import re
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


class SmallModel(nn.Module):
    """A model with a fused weight of 192 rows, as pages name one."""

    def __init__(self):
        super().__init__()
        self.up, self.qkv = nn.Linear(64, 64), nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(self.up(x))


@pytest.fixture
def names(kernel, tmp_path, monkeypatch):
    """What a user has before the first block: a model, torch, and a Hub that has this build."""
    hub = ModuleType("kernels")
    hub.get_kernel = lambda repo_id, version, trust_remote_code: kernel
    monkeypatch.setitem(sys.modules, "kernels", hub)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield {"model": SmallModel(), "torch": torch}
    dist.destroy_process_group()


def step(names: dict) -> None:
    """Train by one step with the optimizer that a block has made."""
    names["model"](torch.ones(2, 64)).sum().backward()
    names["opt"].step()


def test_the_readmes_python_runs(repository, names):
    page = blocks((repository / "README.md").read_text())
    assert len(page) == 3
    for block in page:
        exec(block, names)
        step(names)
    assert len(names["opt"].explain().rows) == 4


def test_the_class_for_parameters_without_names_gives_vocabularies_to_adamw(repository, names):
    (block,) = (each for each in blocks((repository / "docs/faq.md").read_text()) if "MuonWithoutNames" in each)
    exec(block, names)
    embedding, matrix = nn.Parameter(torch.ones(50, 8)), nn.Parameter(torch.ones(8, 8))
    rows = names["MuonWithoutNames"]([embedding, matrix], vocabulary=50, lr=0.02).explain().rows
    assert [row.branch for row in rows] == ["muon", "adamw"] and [row.shape for row in rows] == [(8, 8), (50, 8)]


@pytest.mark.parametrize("page, count", [("faq", 7), ("distributed", 3), ("momentum", 1)])
def test_a_pages_python_runs(kernel, repository, names, tmp_path, page, count):
    names.update(optimizer=kernel, fully_shard=fully_shard, folder=tmp_path / "checkpoint")
    adamw = torch.optim.AdamW(names["model"].named_parameters())
    step({**names, "opt": adamw})
    names.update(saved=adamw.state_dict(), steps=2, schedule=lambda step: 1 / (1 + step))
    page = blocks((repository / f"docs/{page}.md").read_text())
    assert len(page) == count
    for block in page:
        exec(block, names)
        step(names)
