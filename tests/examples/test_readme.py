"""The README's Python runs as it stands there, one block after the other, in a group of one rank."""

import re
import sys
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_readmes_python_runs(kernel, repository, tmp_path, monkeypatch):
    hub = ModuleType("kernels")
    hub.get_kernel = lambda repo_id, version, trust_remote_code: kernel
    monkeypatch.setitem(sys.modules, "kernels", hub)
    names = {"model": nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), "torch": torch}
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        found = blocks((repository / "README.md").read_text())
        assert len(found) == 3
        for block in found:
            exec(block, names)
            names["model"](torch.ones(2, 8)).sum().backward()
            names["opt"].step()
        assert len(names["opt"].explain().rows) == 4
    finally:
        dist.destroy_process_group()
