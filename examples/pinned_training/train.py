"""Train a small network with the pinned kernel, and continue where the last run ended.

python train.py [--steps 50] [--checkpoint checkpoint.pt]
torchrun --nproc-per-node 8 train.py
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from kernel import PinError, load_kernel
from torch.nn.parallel import DistributedDataParallel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="of this run: %(default)s")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, got {arguments.steps}")
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(load_kernel(), arguments.steps, arguments.checkpoint)
    except PinError as error:
        say(f"train.py: {error}")
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def train(optimizer: ModuleType, steps: int, file: Path) -> None:
    say(f"Loaded {optimizer.build_info()}")
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)).to(device)
    exchange = optimizer.ExchangeOptions(process_group=dist.group.WORLD) if dist.is_initialized() else None
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02, exchange=exchange)
    first = resume(optimizer, model, opt, file) if file.exists() else 0
    replica = DistributedDataParallel(model) if dist.is_initialized() else model
    for step in range(first, first + steps):
        batch = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(32, 16, generator=batch).to(device)
        loss = (replica(x) - x.flip(-1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    say(f"Step {first + steps}: loss {loss.item():.6f}")
    if rank == 0:
        saved = {"step": first + steps, "model": model.state_dict(), "optimizer": opt.state_dict()}
        torch.save(saved, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)  # a run that is killed leaves the last checkpoint whole


def resume(optimizer: ModuleType, model: torch.nn.Module, opt: torch.optim.Optimizer, file: Path) -> int:
    """Load a checkpoint, say whether another build has written it, and return its step."""
    saved = torch.load(file, weights_only=True, map_location="cpu")
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    build = saved["optimizer"]["param_groups"][0]["build"]
    if build != str(optimizer.build_info()):
        say(f"The checkpoint is of another build: {build}")
    say(f"Continuing at step {saved['step']}")
    return saved["step"]


def say(text: str) -> None:
    """Print a line once, however many processes there are."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
