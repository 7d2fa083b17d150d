"""Train the character model on several processes, save it, and continue with another layout.

torchrun --nproc-per-node 4 -m examples.train_fsdp2 --layout fsdp --steps 40 --stop-after 20 --checkpoint out/fsdp2
torchrun --nproc-per-node 4 -m examples.train_fsdp2 --layout tp --steps 40 --checkpoint out/fsdp2 --resume
python -m examples.train_fsdp2 --layout single --steps 40

`fsdp` shards every parameter over all processes. `hsdp` shards over half of them, with two copies. `tp` splits the MLPs
in two by tensor parallelism, and shards over the rest. With each layout the model sees the same windows in the same
order, and ends at the same loss up to rounding, because gradients are summed in another order. For that, the shares of
the 16 windows must be equally large: with another number of processes it says which ones will do. It runs on CPUs, over
gloo; `--build` is the folder into which `make build` has put the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .character_model.corpus import Corpus, read_corpus, standard_library
from .character_model.model import CONTEXT, CharacterModel, loss_of
from .launch import (
    check_processes,
    leave,
    load_kernel,
    parsed,
    parser_of,
    processes,
    progress,
    rank,
    set_learning_rate,
    steps_after,
)

LAYOUTS = ("single", "fsdp", "hsdp", "tp")
BATCH = 16  # windows, of all processes together
HELD_OUT = 64  # windows of the validation text
LR = 2e-2


def main() -> None:
    options = parsed(parser())
    with processes(together=options.layout != "single"):
        run(options, load_kernel(options.build))


def parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, LAYOUTS, "fsdp")
    parser.add_argument("--trace", type=Path, help="trace of each process, TRACE.<rank>.json")
    return parser


def run(options: argparse.Namespace, kernel: ModuleType) -> None:
    corpus = read_corpus(standard_library()[: options.text_bytes])
    torch.manual_seed(0)
    model = CharacterModel(corpus.symbols)
    data_mesh = shard(model, options.layout)
    # Small chunks, so that even a model this small has several, and one is exchanged while another is worked on.
    optimizer = kernel.Muon(model.named_parameters(), lr=LR, exchange=kernel.ExchangeOptions(chunk_bytes=2**15))
    steps = steps_after(load(model, optimizer, options.checkpoint) if options.resume else 0, options)
    losses = []
    with progress(len(steps), options.layout) as advance, traced(options.trace):
        for step in steps:
            set_learning_rate(optimizer, LR, step, options.steps)
            losses.append(train_step(model, optimizer, batch_of(corpus, step), data_mesh))
            advance(losses[-1])
    held_out = mean_over(data_mesh, loss_on(model, corpus.validation_windows(HELD_OUT, CONTEXT + 1), data_mesh))
    if options.checkpoint is not None:
        save(model, optimizer, steps.stop, options.checkpoint)
    if rank() == 0:
        print(
            f"{options.layout}: steps {steps.start} to {steps.stop}, validation loss {held_out:.4f} nats per character"
        )
        if options.result is not None:
            content = {"layout": options.layout, "first": steps.start, "train": losses, "validation": held_out}
            options.result.write_text(json.dumps(content) + "\n")


def shard(model: CharacterModel, layout: str) -> DeviceMesh | None:
    """Shard the model in place, and return the mesh of the processes that work on different data."""
    if layout == "single":
        return None
    check_processes(layout, possible_processes(layout))
    ranks = dist.get_world_size()
    if layout == "fsdp":
        mesh = data_mesh = init_device_mesh("cpu", (ranks,))
    elif layout == "hsdp":
        mesh = data_mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    else:
        both = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        mesh = data_mesh = both["data"]
        for layer in model.layers:
            parallelize_module(layer.mlp, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return data_mesh


def possible_processes(layout: str) -> list[int]:
    """Return the numbers of processes with which a layout gives each share of the data as many windows."""
    shares = [number for number in range(1, BATCH + 1) if BATCH % number == 0]
    if layout == "tp":
        return [2 * number for number in shares]
    return [number for number in shares if layout == "fsdp" or number % 2 == 0]


def train_step(model: nn.Module, optimizer, windows: Tensor, mesh: DeviceMesh | None) -> float:
    """Take one step on this process's share of the windows, and return the loss over all of them."""
    loss = loss_of(model, share_of(windows, mesh))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return mean_over(mesh, loss.detach())


@torch.no_grad()
def loss_on(model: nn.Module, windows: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return the mean loss over this process's share of the windows."""
    return loss_of(model, share_of(windows, mesh))


def batch_of(corpus: Corpus, step: int) -> Tensor:
    """Return the windows of a step. They depend on the step only, so a resumed run sees the same ones."""
    return corpus.batch(BATCH, CONTEXT + 1, torch.Generator().manual_seed(step))


def share_of(windows: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return the windows of this process. Processes of one tensor parallel group have the same ones."""
    if mesh is None:
        return windows
    shares = windows.chunk(mesh.size())
    place = mesh.mesh.flatten().tolist().index(dist.get_rank())
    return shares[place]


def mean_over(mesh: DeviceMesh | None, value: Tensor) -> float:
    """Return the mean of all processes' values. Each share of the data has the same number of processes."""
    if mesh is not None:
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value.item()


def save(model: nn.Module, optimizer, step: int, folder: Path) -> None:
    """Save model and optimizer after `step` steps; all processes write their parts."""
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state, "step": step}, checkpoint_id=folder)


def load(model: nn.Module, optimizer, folder: Path) -> int:
    """Load a checkpoint of any layout, and return how many steps it has taken."""
    parameters, state = get_state_dict(model, optimizer)
    checkpoint = {"model": parameters, "optimizer": state, "step": 0}
    dcp.load(checkpoint, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=checkpoint["model"], optim_state_dict=checkpoint["optimizer"])
    return checkpoint["step"]


@contextlib.contextmanager
def traced(path: Path | None) -> Iterator:
    """Write a trace of the block, if `path` is given."""
    if path is None:
        yield
        return
    # With shapes, from which `tools.scale.calibrate` computes what was sent.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        yield
    profile.export_chrome_trace(f"{path}.{rank()}.json")


if __name__ == "__main__":
    main()
    leave()
