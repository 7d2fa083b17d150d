"""Time what a step of a model costs the host, launches included, without a GPU.

    python -m benchmarks.sweep_model_host [--build DIR] [--models NAME ...] [--rounds N] [--output FILE] [--tiny]

Matrices are a model's, with shorter sides and in the batches that a GPU would have. The compiled ops and torch's AdamW,
including its count of steps, do nothing: each is only dispatched. In the row `replayed` every
batch has a CUDA graph, whose replay is a call of a driver that does nothing; without a GPU no more can be shown.
In the row `eager` symmetric products are launched by Triton's launcher over that driver. torch's other operations
run, on matrices so small that only starting them takes time. Rows take turns; times are quartiles of
processor time on one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor
from torch.library import Library

from benchmarks.built_kernel import find_variant, load_variant, read_metadata
from benchmarks.host_worker import empty_ops
from benchmarks.result_file import ResultFile, default_path, facts
from benchmarks.shapes import MODELS, Parameter, gpt2
from benchmarks.step_costs import replaced
from benchmarks.stubbed_driver import stubbed_gpu
from benchmarks.sweep_launch import GPU
from benchmarks.terminal import print_results
from benchmarks.timing import processor_seconds, quartiles

ROOT = Path(__file__).resolve().parent.parent
# The target in milliseconds of a step whose batches are replayed.
TARGETS = {"gpt2-124m": 0.5, "moe-64": 3.0, "llama-1b": 4.0}
ROUNDS, TINY_ROUNDS = 25, 3
# At a 32nd of the length, torch's products of llama-1b would take 70 ms of a step on a CPU.
SHRINKING, SMALLEST_SIDE = 256, 2
ONE_BLOCK = gpt2(layers=1, hidden=1024)  # narrower ones have shapes that become one
PACKED_ITEMSIZE = 4  # float32 directions for work in float16


def shrunk(p: Parameter) -> tuple[int, ...]:
    sides = p.rows_and_columns if p.matrix else p.shape
    return tuple(max(SMALLEST_SIDE, side // SHRINKING) for side in sides)


def batch_lengths(parameters: Sequence[Parameter], batch_bytes: int) -> dict[tuple[int, ...], int]:
    """Return how many matrices a batch of at most `batch_bytes` has, from their shortened sides.

    Raises ValueError where matrices of different shapes have the same shortened sides: their batches would be one.
    """
    elements = {shrunk(p): p.elements for p in parameters if p.matrix}
    shapes = {p.rows_and_columns for p in parameters if p.matrix}
    if len(elements) < len(shapes):
        raise ValueError(f"{len(shapes)} shapes become {len(elements)} when their sides are divided by {SHRINKING}")
    return {sides: max(1, batch_bytes // (count * PACKED_ITEMSIZE)) for sides, count in elements.items()}


def build(kernel: ModuleType, parameters: Sequence[Parameter]):
    """Return Muon over a model of small matrices with gradients, in float16 and the batches of a GPU."""
    named = []
    for p in parameters:
        tensor = torch.nn.Parameter(torch.ones(shrunk(p)))
        tensor.grad = torch.ones_like(tensor)
        named.append((p.name, tensor, p.matrix))
    groups = [{"params": [(n, t) for n, t, m in named if m is muon], "use_muon": muon} for muon in (True, False)]
    optimizer = kernel.Muon(groups, ns_dtype=torch.float16)
    optimizer.step()
    return optimizer


def gpu_like(kernel: ModuleType, parameters: Sequence[Parameter], stack: ExitStack) -> None:
    """Make the package plan and pack as on a GPU, and launch nothing itself."""
    products, batches, chain_key = kernel.kernels.products, kernel.plan.batches, kernel.polar.chains.chain_key
    lengths = batch_lengths(parameters, batches.BATCH_BYTES)
    table = products.SYMMETRIC._replace(gram_gain=1.6, square_gain=1.6, square_name="symmetric_gemm")
    length = mock.patch.object(batches, "_length", lambda matrix, _: lengths[matrix.rows, matrix.cols])
    stack.enter_context(length)
    as_on_gpu = {
        chain_key: lambda device, iteration: chain_key(torch.device("cuda"), iteration),
        kernel.rules.short_vectors.update_joined_: lambda update, tensors: update(tensors),  # only CPUs join vectors
    }
    stack.enter_context(replaced(kernel, {products.select_products: lambda *_: table, **as_on_gpu}))
    stack.callback(lambda ops: None, empty_adamw())
    stack.enter_context(
        mock.patch.object(kernel.kernels.gpu.launch_cache, "can_launch_on", lambda A: type(A) is Tensor)
    )


def empty_adamw() -> Library:
    """Make torch's AdamW do nothing while the result is held.

    Steps are counted by one launch on a GPU, but by an operation for each parameter on a CPU.
    """
    library = Library("aten", "IMPL")
    for name in "_fused_adamw_", "_foreach_add_.Scalar":
        library.impl(name, lambda *arguments, **options: None, "CPU", allow_override=True)
    return library


def replayed(kernel: ModuleType, launch: Callable[[], object]):
    """Replaces `UpdateGraphs.packed` as if every chain had a graph: static memory, and one launch for a replay."""
    graphs, update = kernel.step.graphs, kernel.step.polar_update
    kept: dict[tuple, object] = {}

    def packed(self, chain: Sequence[tuple]):
        key = graphs.kinds_of(chain)
        if key not in kept:
            members, updates = [], []
            for batch, count, eps in chain:
                directions = update.packed_memory(batch, count)
                members.append(graphs.Packed(batch, eps, directions, update.norms_memory(batch, directions)))
                updates.append(update.as_parameter(batch, directions.half()))
            kept[key] = graphs.PackedChain(members, lambda: (launch(), updates)[1])
        return kept[key]

    return packed


def measure(kernel: ModuleType, parameters: Sequence[Parameter], rounds: int) -> dict[str, dict]:
    """Return the row of each way of launching."""
    variant = Path(kernel.__file__).parent
    with ExitStack() as stack:
        driver = stack.enter_context(stubbed_gpu(GPU, variant, kernel.kernels.gpu.symmetric_gemm))
        gpu_like(kernel, parameters, stack)
        stack.callback(lambda ops: None, empty_ops(read_metadata(variant)["id"]))
        optimizer = build(kernel, parameters)
        packed = replayed(kernel, driver.launches_so_far)
        patch = partial(mock.patch.object, kernel.step.graphs.UpdateGraphs, "packed", packed)
        seconds: dict[str, list[float]] = {"replayed": [], "eager": []}
        for _ in range(rounds):
            with patch():
                optimizer.step()
                seconds["replayed"].append(processor_seconds(optimizer.step))
            optimizer.step()
            seconds["eager"].append(processor_seconds(optimizer.step))
        batches = len(optimizer._plan_cache.plan.batches)
    matrices = sum(p.matrix for p in parameters)
    sizes = {"matrices": matrices, "batches": batches}
    return {way: {**sizes, "milliseconds": [1e3 * t for t in quartiles(times)]} for way, times in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time what a step of a model costs the host, launches included.")
    parser.add_argument("--models", nargs="*", default=[*TARGETS, "llama-8b"], choices=MODELS)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder of variants; build/")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results, none if tiny")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few rounds, to see that it runs")
    options = parser.parse_args(arguments)
    models = {"tiny": ONE_BLOCK} if options.tiny else {name: MODELS[name] for name in options.models}
    rounds = TINY_ROUNDS if options.tiny else options.rounds
    torch.set_num_threads(1)
    kernel, device = load_variant(find_variant(options.build)), torch.device("cpu")
    path = options.output or (None if options.tiny else default_path("model-host", device))
    names = [f"{model}, {way}" for model in models for way in ("replayed", "eager")]
    results = ResultFile(path, facts(kernel, device, {"rounds": rounds, "gpu": GPU}), names)
    for model, parameters in models.items():
        for way, row in measure(kernel, parameters, rounds).items():
            target = TARGETS.get(model) if way == "replayed" else None
            results.put(f"{model}, {way}", {**row, "target_milliseconds": target})
    print_results(list(results.rows.values()))


if __name__ == "__main__":
    main()
