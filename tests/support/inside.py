"""What several tests and tools see inside the package: names of its middle that they share stand here.

`kernel` is the package as `get_kernel` returns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Fields of ExchangeOptions, which cases have among Muon's other settings.
EXCHANGE = ("process_group", "chunk_bytes", "chunks_in_flight", "ranks_per_matrix", "sum_gram")


def muon_settings(kernel: ModuleType, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of Muon, of settings among which are those of an exchange."""
    exchange = {key: settings[key] for key in EXCHANGE if key in settings}
    rest = {key: value for key, value in settings.items() if key not in EXCHANGE}
    return {**rest, **({"exchange": kernel.ExchangeOptions(**exchange)} if exchange else {})}


def plan_of(optimizer):
    """Return the plan of an optimizer's last step."""
    return optimizer._plan_cache.plan


def workspace_of(optimizer):
    """Return the workspace of an optimizer's last step."""
    return optimizer._plan_cache.workspace


def chunks_of(optimizer) -> list:
    """Return the chunks that this rank exchanges."""
    return [chunk for exchange in plan_of(optimizer).exchanges for chunk in exchange.chunks]


def host_of(optimizer):
    """Return the one object that has the momentum of an optimizer in host memory; None where there is none."""
    works = [work for chain in workspace_of(optimizer).chains for work in chain]
    hosts = {id(work.host): work.host for work in works if work.host is not None}
    return next(iter(hosts.values()), None)


def device_bytes(host) -> int:
    """Return how much of the device's memory the chunks of `host`, which are not all empty, take by turns."""
    (size,) = {part.untyped_storage().nbytes() for parts in host._device for part in parts}
    return size


def matrix_view(kernel: ModuleType, shape: Sequence[int], **options):
    """Return how a contiguous parameter of this shape is seen as matrices."""
    return kernel.parameters.matrices.matrix_view("w", torch.empty(tuple(shape), device="meta"), **options)


def layout(kernel: ModuleType, shape: Sequence[int], mesh: Sequence[int], ranks: Sequence[int], splits: Sequence):
    """Return how a tensor lies on a mesh of these sizes and ranks."""
    layouts = kernel.plan.layout
    return layouts.Layout(tuple(shape), layouts.mesh_of(tuple(mesh), tuple(ranks)), tuple(splits))


def shards(kernel: ModuleType, view, layout):
    """Return a parameter's view and layout as one."""
    return kernel.plan.shards.Shards(view, layout)


def matrix(kernel: ModuleType, number: int, index: int, shards, cost: int = 1):
    """Return the record of a matrix of the parameter of this number, for plans of messages, in float32."""
    rows, cols = shards.view.shapes[index]
    dtypes = {"packed_dtype": torch.float32, "work_dtype": torch.float32}
    others = {"update_dtype": torch.float32, "moments_view": None, "moments_dtype": torch.float32, "keeps_norm": False}
    parameter = SimpleNamespace(number=number, name=f"layers.{number}.weight", **dtypes, **others)
    parameter.equalization = kernel.rules.equalization.Equalization()
    return kernel.plan.matrix.Matrix(parameter, index, rows, cols, 1.0, None, shards, cost)


def flops(kernel: ModuleType, rows: int, cols: int) -> int:
    """Return the FLOPs of one step of the standard iteration, as owners count them."""
    return kernel.plan.costs.standard_step_flops(rows, cols)


def plan_messages(kernel: ModuleType, matrices: Sequence, ranks: Sequence[int], rank: int, limit: int):
    """Return the messages of each chunk as `rank` plans them, and all loads."""
    return kernel.plan.messages.plan_messages(matrices, tuple(ranks), rank, limit)


def lengths(messages, stage: str) -> SimpleNamespace:
    """Return how many elements a rank sends to, and receives from, each rank in the `gather` or the `scatter`."""
    holder, owner = messages.holder, messages.owner
    sent, received = (holder.sent, owner.received) if stage == "gather" else (owner.sent, holder.received)
    return SimpleNamespace(sent=sent, received=received)


def gathered_parts(owner) -> list[tuple]:
    """Return each part that an owner gets: the position of its matrix, the part, and its offset in what has come."""
    parts = [part for part in owner.parts if part.gathered is not None]
    return [(part.position, part.part, part.gathered.elements) for part in parts]


def scattered_parts(owner) -> list[tuple]:
    """Return each part that an owner sends back, likewise."""
    return [(part.position, part.part, part.scattered.elements) for part in owner.parts]


def iterate(kernel: ModuleType, G: Tensor, dtype: torch.dtype, method: str, products: str) -> Tensor:
    """Return the polar factors of G by Polar Express on `BATCHED` products, torch's, or on `SYMMETRIC` ones."""
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    iteration = kernel.iteration.choose_iteration(G.device, dtype, tuple(sorted(G.shape[1:])), schedule, method)
    chosen = iteration._replace(products=getattr(kernel.kernels.products, products), in_one_launch=False)
    return kernel.polar.factors.polar_factors(G, chosen, 1e-7)


def always_exchanged(kernel: ModuleType):
    """Return a patch by which a rank that is alone sends its matrices all the same."""
    return mock.patch.object(kernel.plan.matrix.Matrix, "has_owner", True)
