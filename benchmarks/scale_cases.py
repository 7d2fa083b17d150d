"""Published models as one of hundreds of ranks sees them: real DTensors over memory that nobody reads or writes.

The group is torch's fake one, in which no other rank exists. Parameters, gradients and momentum are as large as that
rank's are, but virtual: memory pages that are never touched take no memory. So nothing in a step may touch them:

- The package's compiled ops do nothing (`host_worker.empty_ops`), nor does `_foreach_copy_`, which copies blocks. Each
  call is still dispatched, which takes about as long as a launch.
- A small matrix is orthogonalized instead of a batch: with as many operations per batch as on a GPU, but without
  its products.
- An all-to-all sends nothing. Flags are written to separate memory and read as zeros. The sums by which ranks compare
  their steps are zero, as if all agreed.

Products, and the number of matrices that are worked on together, are chosen as on a GPU. Everything else is the
package's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from tools.scale.models import LLAMA_70B, MOE_1T, Weights
from tools.scale.plans import EXPERT_RANKS, SHARDS

TINY = [Weights("mlp.up", (24, 8), 3), Weights("mlp.down", (8, 24), 3), Weights("experts.up", (4, 8, 16), 2)]
MODELS = {"Llama 70B": LLAMA_70B, "MoE 1T": MOE_1T, "tiny": TINY}


class Case(NamedTuple):
    """A model, its number of ranks, the dtype in which matrices are multiplied, and the targets."""

    model: str
    ranks: int
    work_dtype: str
    target_milliseconds: float | None = None  # of a step
    target_seconds: float | None = None  # of the plan
    shards: int = SHARDS  # of everything except experts; with more ranks there are copies
    expert_ranks: int = EXPERT_RANKS

    def __str__(self) -> str:
        return f"{self.model} on {self.ranks:,} ranks, {self.work_dtype}"


CASES = [
    case
    for dtype in ("bfloat16", "float16")
    for case in (
        Case("Llama 70B", 256, dtype, 15.0, 2.0),
        Case("Llama 70B", 1024, dtype, None, 2.0),
        Case("MoE 1T", 1024, dtype, 30.0, 2.0),
    )
]
TINY_CASES = [Case("tiny", 8, "bfloat16", 15.0, 2.0, shards=4, expert_ranks=2)]


@contextmanager
def imagined(ranks: int) -> Iterator[None]:
    """Act as the first of this number of `ranks`; no other exists. Load the kernel inside this context."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def untouched(kernel: ModuleType) -> Iterator[None]:
    """Make steps and constructors leave large memory untouched, as described at the top."""
    with ExitStack() as stack:

        def replace(where: object, name: str, by: object) -> None:
            stack.enter_context(mock.patch.object(where, name, by))

        replace(dist, "all_to_all_single", _send_nothing)
        replace(
            kernel.step.agreement.meeting,
            "all_reduce_sum_",
            _others_agree(kernel.step.agreement.meeting.all_reduce_sum_),
        )
        replace(torch, "zeros_like", torch.empty_like)
        replace(torch, "_foreach_copy_", _copy_nothing)
        replace(Tensor, "index_copy_", lambda buffer, dim, places, flags: torch.empty_like(flags).copy_(flags))
        replace(Tensor, "index_fill_", lambda buffer, dim, places, flag: buffer.new_full(places.shape, flag))
        replace(Tensor, "index_select", lambda buffer, dim, places: buffer.new_zeros(places.shape))
        replace(kernel.iteration, "select_products", lambda *_: kernel.kernels.products.BATCHED)
        replace(kernel.plan.batches, "matrices_together", _together_on_a_gpu(kernel))
        replace(kernel.step.graphs, "polar_updates", _updates_of_small_matrices(kernel))
        replace(kernel.step.finish, "norms_of_updates", _norms_of_a_small_matrix(kernel))
        yield


def build_optimizer(kernel: ModuleType, case: Case) -> Optimizer:
    """Return Muon over the model with gradients; needs the group of `imagined`, inside `untouched`."""
    copies = case.ranks // case.shards
    dense = init_device_mesh("cpu", (copies, case.shards) if copies > 1 else (case.shards,))
    experts = init_device_mesh("cpu", (case.ranks // case.expert_ranks, case.expert_ranks))
    named = []
    for kind in MODELS[case.model]:
        placed = (experts, [Shard(1), Shard(0)])
        if len(kind.shape) == 2:
            placed = (dense, [Replicate(), Shard(0)][-dense.ndim :])
        for number in range(kind.count):
            parameter = torch.nn.Parameter(part(kind.shape, *placed))
            parameter.grad = part(kind.shape, *placed)
            named.append((f"layers.{number}.{kind.name}.weight", parameter))
    group = {"params": named, "use_muon": True}
    return kernel.Muon([group], ns_dtype=case.work_dtype, expert_keys=("experts",))


def part(shape: tuple[int, ...], mesh: DeviceMesh, placements: list) -> DTensor:
    """Return a bfloat16 tensor of which this rank, the first, has the first part, in memory that is not touched."""
    local = list(shape)
    for size, placement in zip(mesh.shape, placements):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // size)
    memory = torch.empty(local, dtype=torch.bfloat16)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(memory, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _send_nothing(
    output: Tensor, input: Tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op: bool = False
):
    # Makes the object that a collective returns.
    return dist.all_reduce(torch.empty(1), group=group, async_op=async_op)


def _others_agree(all_reduce_sum_: Callable[..., None]) -> Callable[..., None]:
    """Return the collective with what other ranks would have added."""

    def reduce_(values: Tensor, *names: object) -> None:
        all_reduce_sum_(values, *names)
        values.zero_()

    return reduce_


def _copy_nothing(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch.empty(1).zero_()  # what is dispatched instead


def _together_on_a_gpu(kernel: ModuleType):
    """Return how many matrices (m, n) share a batch on a GPU, instead of the number that fits into a CPU's caches."""

    def together(device: torch.device, size: tuple[int, int], iteration) -> int:
        width = torch.promote_types(iteration.work_dtype, torch.bfloat16).itemsize  # directions for float16 are float32
        return max(1, kernel.plan.batches.BATCH_BYTES // (size[0] * size[1] * width))

    return together


def _updates_of_small_matrices(kernel: ModuleType):
    """Return a replacement of `polar_updates`: as many operations on a small matrix, and batches that nobody wrote."""
    step = kernel.step.polar_update
    small = torch.eye(4).unsqueeze(0)

    def update(packed: step.Packed) -> Tensor:
        batch, norms = packed.batch, None if packed.norms is None else packed.norms[:1]
        directions = small.to(packed.directions.dtype)
        step.update_of_factors_(
            kernel.polar.factors.polar_factors(directions, batch.iteration, packed.eps, norms=norms)
        )
        factors = torch.empty(packed.directions.shape, dtype=batch.iteration.work_dtype)
        return step.as_parameter(batch, factors)

    return lambda members: list(map(update, members))


def _norms_of_a_small_matrix(kernel: ModuleType):
    """Return a replacement of `norms_of_updates`, which does not read the batch that nobody wrote."""
    norms_of_updates = kernel.step.finish.norms_of_updates

    def norms(updates: Tensor) -> Tensor:
        norms_of_updates(torch.ones(1, 4, 4, dtype=updates.dtype))
        return torch.zeros(len(updates))

    return norms
