"""One warm step of Muon, traced: of whole tensors in one process, or of row shards in several.

The model is the smallest with everything that a step treats differently: two matrices of one size, which form a batch,
one of another size, and a vector.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.built_kernel import load_variant
from tools.trace.tracer import Trace, trace

SHAPES = ((64, 32), (64, 32), (48, 64), (64,))
# The first step makes the plan, the state and everything else that is kept.
WARM_UP = 2


def trace_variant(folder: Path, ranks: int) -> Trace:
    """Return the trace of a step of the variant in `folder`, on the first of `ranks` ranks over gloo.

    It runs in separate processes, because two builds of one commit cannot be loaded into one. One rank has no group.
    """
    with tempfile.TemporaryDirectory() as shared:
        torch.multiprocessing.spawn(_run_rank, (ranks, folder, Path(shared)), nprocs=ranks)
        return pickle.loads((Path(shared) / "trace").read_bytes())


def trace_step(kernel: ModuleType) -> Trace:
    """Return the trace of a warm step. In a process group the parameters are row shards."""
    place = _row_shard() if dist.is_initialized() else _whole
    generator = torch.Generator().manual_seed(0)
    named = []
    for number, shape in enumerate(SHAPES):
        value, gradient = (place(torch.randn(shape, generator=generator)) for _ in range(2))
        parameter = torch.nn.Parameter(value)
        parameter.grad = gradient
        named.append((f"layers.{number}.weight", parameter))
    optimizer = kernel.Muon(named)
    for _ in range(WARM_UP):
        optimizer.step()
    return trace(optimizer.step, Path(kernel.__file__).parent)


def _row_shard() -> Callable[[Tensor], Tensor]:
    """Return a function that shards a tensor, equal on all ranks, by rows, as FSDP2 does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return lambda whole: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def _whole(value: Tensor) -> Tensor:
    return value


def _run_rank(rank: int, ranks: int, folder: Path, shared: Path) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        if sys.platform == "linux":  # otherwise gloo would look up the address of the host's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(shared / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    step_trace = trace_step(load_variant(folder))
    if rank == 0:
        (shared / "trace").write_bytes(pickle.dumps(step_trace))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
