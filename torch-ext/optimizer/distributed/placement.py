"""Where the parts of a sharded parameter are; the only file that knows how a DTensor says so."""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from typing import NamedTuple, Optional

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# Neighbouring indices of one dimension, as (start, stop), in rising order.
Runs = tuple[tuple[int, int], ...]

# Groups by their ranks, and the world that they are of, as another one may follow it. Each is made once in a process,
# since making one is a collective of its members. Weak: a group that outlives `destroy_process_group` aborts the exit.
_GROUPS: dict[tuple[int, ...], tuple[weakref.ref, weakref.ref]] = {}

# Meshes by what they stem from. Weak, as a device mesh holds its groups.
_MESHES: weakref.WeakKeyDictionary[DeviceMesh, Mesh] = weakref.WeakKeyDictionary()


class Mesh:
    """The ranks of a mesh of `shape`, in the order of their coordinates; equal ones are one object (`mesh_of`).

    `digest` is of the ranks.
    """

    def __init__(self, shape: tuple[int, ...], ranks: tuple[int, ...]):
        self.shape = shape
        self.ranks = ranks
        self.members = tuple(sorted(ranks))
        self._position = {rank: i for i, rank in enumerate(ranks)}
        self.digest = f"{zlib.crc32(repr(ranks).encode()):08x}"

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return where `rank` is in each dimension."""
        found, position = [], self._position[rank]
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            found.append(index)
        return tuple(reversed(found))


class Layout(NamedTuple):
    """How a tensor of `shape` lies on a mesh, in numbers: the same on every rank.

    Each dimension of the mesh replicates the tensor, None, or splits a dimension of it as `torch.chunk` does. With a
    factor above 1 it first cuts that dimension into as many pieces, and each of them: so FSDP2 splits what tensor
    parallelism has split before.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    splits: tuple[Optional[tuple[int, int]], ...]  # dimension and factor

    @property
    def copies(self) -> int:
        """How many copies of the tensor there are."""
        return math.prod(size for size, split in zip(self.mesh.shape, self.splits) if split is None)

    def copy_of(self, rank: int) -> tuple[int, ...]:
        """Return which copy of the tensor `rank` has a part of."""
        own = zip(self.splits, self.mesh.coordinates(rank))
        return tuple(index for split, index in own if split is None)


@functools.cache
def mesh_of(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Mesh:
    """Return the mesh of these sizes and ranks, the same object each time."""
    return Mesh(shape, ranks)


def layout_of(name: str, tensor: Tensor, ranks: Optional[tuple[int, ...]] = None) -> Optional[Layout]:
    """Return the layout of a DTensor, or of a plain tensor that each of `ranks` has a copy of; else None.

    Raises ValueError for a DTensor whose parts are yet to be summed.
    """
    if not isinstance(tensor, DTensor):
        if ranks is None:
            return None
        return Layout(tuple(tensor.shape), mesh_of((len(ranks),), ranks), (None,))
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"{name} has placements {tensor.placements}: Partial values must be reduced before a step")
    splits = tuple(_split_of(name, placement) for placement in tensor.placements)
    return Layout(tuple(tensor.shape), _numbers_of(tensor.device_mesh), splits)


@functools.lru_cache(maxsize=2**16)
def some_copies(layout: Layout, count: int, rank: int) -> Layout:
    """Return how `count` of a tensor's copies lie, side by side, those that `rank` is among; `count` divides all."""
    copies: dict[tuple[int, ...], list[int]] = {}
    for member in layout.mesh.ranks:
        copies.setdefault(layout.copy_of(member), []).append(member)
    place = list(copies).index(layout.copy_of(rank))
    chosen = list(copies.values())[place - place % count :][:count]
    sharded = [(size, split) for size, split in zip(layout.mesh.shape, layout.splits) if split is not None]
    mesh = mesh_of((count, *(size for size, _ in sharded)), tuple(member for copy in chosen for member in copy))
    return Layout(layout.shape, mesh, (None, *(split for _, split in sharded)))


def this_rank() -> int:
    """Return this process's rank, 0 where there is no other."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a process group of `ranks`, in rising order, made when they first ask for it.

    Only its members take part in making it: another pipeline stage, which has other ranks, is not waited for.
    """
    world = dist.group.WORLD
    known_world, known = _GROUPS.get(ranks, (None, None))
    if known_world is not None and known_world() is world and known() is not None:
        return known()
    group = world
    if len(ranks) < world.size():
        timeout = world._get_backend(world._device_types[0]).options._timeout  # what the user gave
        # Of a world that is bound to a device torch would split the communicator, for which all ranks must come.
        device, world.bound_device_id = world.bound_device_id, None
        try:
            group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        finally:
            world.bound_device_id = device
    _GROUPS[ranks] = weakref.ref(world), weakref.ref(group)
    return group


def ranks_of(group: Optional[dist.ProcessGroup]) -> Optional[tuple[int, ...]]:
    """Return the ranks of `group` in rising order, for which `group_of` returns it from now on; None for None."""
    if group is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    if list(ranks) != sorted(ranks):
        raise ValueError(f"process_group must have its ranks in rising order, as those of DDP have, got {ranks}")
    _GROUPS[ranks] = weakref.ref(dist.group.WORLD), weakref.ref(group)
    return ranks


def check_gradient_layout(p: Tensor) -> None:
    """Raise ValueError unless the gradient of `p` lies on ranks as `p` does."""
    if isinstance(p, DTensor) == isinstance(p.grad, DTensor):
        if not isinstance(p, DTensor) or (p.placements, p.device_mesh) == (p.grad.placements, p.grad.device_mesh):
            return
    raise ValueError(
        f"a parameter {tuple(p.shape)} with placements {_placements(p)} has a gradient with {_placements(p.grad)}; "
        "bring it in line before the step: p.grad = p.grad.redistribute(placements=p.placements)"
    )


def _placements(tensor: Tensor) -> str:
    return str(tensor.placements) if isinstance(tensor, DTensor) else "none"


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory, and a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@functools.lru_cache(maxsize=2**16)
def runs_of(layout: Layout, rank: int) -> tuple[Runs, ...]:
    """Return, for each dimension of the tensor, the indices that `rank` holds."""
    held = [((0, size),) for size in layout.shape]
    for split, parts, index in zip(layout.splits, layout.mesh.shape, layout.mesh.coordinates(rank)):
        if split is not None:
            dim, factor = split
            pieces = [_chunk(held[dim], factor, piece) for piece in range(factor)]
            held[dim] = tuple(run for piece in pieces for run in _chunk(piece, parts, index))
    return tuple(_joined(runs) for runs in held)


def length(runs: Runs) -> int:
    """Return how many indices there are."""
    return sum(stop - start for start, stop in runs)


def within(runs: Runs, start: int, stop: int) -> Runs:
    """Return those of `runs` in [start, stop), counted from `start`."""
    cut = ((max(a, start) - start, min(b, stop) - start) for a, b in runs)
    return tuple((a, b) for a, b in cut if a < b)


def _chunk(runs: Runs, parts: int, index: int) -> Runs:
    """Return the part that `torch.chunk` gives to `index`: the last ones may be short or empty."""
    total = length(runs)
    size = -(-total // parts)
    first, last = min(index * size, total), min((index + 1) * size, total)
    found, passed = [], 0
    for start, stop in runs:
        a, b = max(first - passed, 0), min(last - passed, stop - start)
        if a < b:
            found.append((start + a, start + b))
        passed += stop - start
    return tuple(found)


def _joined(runs: Runs) -> Runs:
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


def _numbers_of(mesh: DeviceMesh) -> Mesh:
    if mesh not in _MESHES:
        _MESHES[mesh] = mesh_of(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    return _MESHES[mesh]


def _split_of(name: str, placement) -> Optional[tuple[int, int]]:
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):  # before Shard, which it is a kind of in some versions of torch
        return placement.dim, placement.split_factor
    if isinstance(placement, Shard):
        return placement.dim, 1
    raise ValueError(f"{name} has a placement {placement}, which is neither Replicate nor Shard")
