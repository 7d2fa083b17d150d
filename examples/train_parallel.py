"""Train a tiny transformer with experts under FSDP2, tensor, expert and pipeline parallelism together.

torchrun --nproc-per-node 8 -m examples.train_parallel --steps 40 --stop-after 20 --checkpoint out/parallel
python -m examples.train_parallel --layout single --steps 40 --checkpoint out/parallel --resume

The eight processes form a mesh: two pipeline stages, two shares of the data, and two for tensor parallelism and
experts. Each stage has its own optimizer, which needs no setting for any of this. With the same gradients, updates have
the same bits as in one process. Gradients and losses themselves agree up to rounding, because they are summed in
another order. It runs on CPUs, over gloo; `--build` is the folder into which `make build` has put the kernel.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .character_model.corpus import read_corpus, standard_library
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
from .parallel_model.checkpoint import load, save
from .parallel_model.model import CONTEXT, loss_of, whole_model
from .parallel_model.sharding import MESH, backward_through, make_mesh, schedule_of, shard_stage_

BATCH = 16  # windows, of all processes together
LR = 2e-2


def main() -> None:
    options = parsed(parser_of(__doc__, ("single", "parallel"), "parallel"))
    with processes(together=options.layout == "parallel"):
        run(options, load_kernel(options.build))


def run(options: argparse.Namespace, kernel: ModuleType) -> None:
    corpus = read_corpus(standard_library()[: options.text_bytes])
    model = whole_model(corpus.symbols)
    backward = prepare_(model, options.layout)
    optimizer = optimizer_of(kernel, model)
    steps = steps_after(load(model, optimizer, options.checkpoint) if options.resume else 0, options)
    losses = []
    with progress(len(steps), options.layout) as advance:
        for step in steps:
            set_learning_rate(optimizer, LR, step, options.steps)
            # Windows depend on the step only, so a resumed run sees the same ones.
            losses.append(backward(corpus.batch(BATCH, CONTEXT + 1, torch.Generator().manual_seed(step))))
            optimizer.step()
            optimizer.zero_grad()
            advance(losses[-1])
    if options.checkpoint is not None:
        save(model, optimizer, steps.stop, options.checkpoint)
    if rank() == 0:
        reached = f", loss {losses[-1]:.4f} nats per character" if losses else ""
        print(f"{options.layout}: steps {steps.start} to {steps.stop}{reached}")
        if options.result is not None:
            content = {"layout": options.layout, "first": steps.start, "train": losses}
            options.result.write_text(json.dumps(content) + "\n")


def prepare_(model: nn.Module, layout: str) -> Callable[[Tensor], float]:
    """Keep this process's part; return a function that sets the gradients of a batch and returns its loss."""
    if layout == "single":
        return lambda windows: backward_alone(model, windows)
    check_processes(layout, [math.prod(MESH.values())])
    mesh = make_mesh()
    shard_stage_(model, mesh)
    schedule = schedule_of(model, mesh)
    return lambda windows: mean_of_last_stage(backward_through(schedule, windows, mesh))


def optimizer_of(kernel: ModuleType, model: nn.Module) -> Optimizer:
    """Return the optimizer of this process's part; its parameters have their full names."""
    # Small chunks, so that even a model this small has several, and one is exchanged while another is worked on.
    exchange = kernel.ExchangeOptions(chunk_bytes=2**12)
    return kernel.Muon(model.named_parameters(), lr=LR, expert_keys=("experts",), exchange=exchange)


def backward_alone(model: nn.Module, windows: Tensor) -> float:
    """Set the gradients of the mean loss over windows (batch, CONTEXT + 1), and return it."""
    loss = loss_of(model(windows[:, :-1]), windows[:, 1:])
    loss.backward()
    return loss.item()


def mean_of_last_stage(loss: Tensor) -> float:
    """Return the mean over the processes of the last stage; the other processes have zeros."""
    dist.all_reduce(loss)
    return loss.item() / (dist.get_world_size() // MESH["pp"])


if __name__ == "__main__":
    main()
    leave()
