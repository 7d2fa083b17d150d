"""Where the parts of a sharded parameter are; the only file that knows how a DTensor says so."""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from operator import attrgetter
from typing import Any, Iterable, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from .process_groups import offer_group, this_rank

# Neighbouring indices of one dimension, as (start, stop), in rising order.
Runs = tuple[tuple[int, int], ...]

# Of thousands of tensors at every step: `map` asks them without a line of Python for each.
_DEVICE, _DTYPE, _SHAPE, _STRIDES = attrgetter("device"), attrgetter("dtype"), attrgetter("shape"), Tensor.stride

# Meshes by what they stem from. Weak, as a device mesh holds its groups.
_MESHES: weakref.WeakKeyDictionary[DeviceMesh, Mesh] = weakref.WeakKeyDictionary()


class Mesh:
    """The ranks of a mesh of `shape`, in the order of their coordinates; equal ones are one object (`mesh_of`)."""

    def __init__(self, shape: tuple[int, ...], ranks: tuple[int, ...]):
        self.shape = shape
        self.ranks = ranks
        self.members = tuple(sorted(ranks))
        self._position = {rank: i for i, rank in enumerate(ranks)}
        self.digest = f"{zlib.crc32(repr(ranks).encode()):08x}"

    def __contains__(self, rank: int) -> bool:
        return rank in self._position

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return where `rank` is in each dimension."""
        indices, position = [], self._position[rank]
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            indices.append(index)
        return tuple(reversed(indices))


class Layout(NamedTuple):
    """How a tensor of `shape` lies on a mesh, in numbers: the same on every rank.

    Each dimension of the mesh replicates the tensor, None, or splits a dimension of it as `torch.chunk` does. With a
    factor f above 1 that dimension is first cut into f pieces, and each piece is split over the dimension of the mesh
    (torch's `_StridedShard`): so FSDP2 splits what tensor parallelism has split before.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    splits: tuple[Optional[tuple[int, int]], ...]  # dimension and factor

    @property
    def copies(self) -> int:
        """How many copies of the tensor there are."""
        return math.prod(size for size, split in zip(self.mesh.shape, self.splits) if split is None)

    @property
    def split_dims(self) -> set[int]:
        """The dimensions of the tensor that are split over ranks."""
        return {split[0] for split in self.splits if split is not None}

    def copy_of(self, rank: int) -> tuple[int, ...]:
        """Return which copy of the tensor `rank` has a part of."""
        coordinates = zip(self.splits, self.mesh.coordinates(rank))
        return tuple(index for split, index in coordinates if split is None)

    def part_of(self, rank: int) -> int:
        """Return the number, from 0 on, of the part that `rank` has: copies of one part have one number."""
        number = 0
        for split, size, index in zip(self.splits, self.mesh.shape, self.mesh.coordinates(rank)):
            number = number if split is None else number * size + index
        return number


@functools.cache
def mesh_of(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Mesh:
    """Return the mesh of these sizes and ranks, the same object each time."""
    return Mesh(shape, ranks)


def layout_of(name: str, tensor: Tensor, ranks: Optional[tuple[int, ...]] = None) -> Optional[Layout]:
    """Return the layout of a DTensor, or of a plain tensor that each of `ranks` has a copy of; else None.

    Raises ValueError for a DTensor whose parts are yet to be summed, or whose part here is not what its placements say.
    """
    if not isinstance(tensor, DTensor):
        if ranks is None:
            return None
        return Layout(tuple(tensor.shape), mesh_of((len(ranks),), ranks), (None,))
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"{name} has placements {tensor.placements}: Partial values must be reduced before a step")
    splits = tuple(_split_of(name, placement) for placement in tensor.placements)
    layout = Layout(tuple(tensor.shape), _numbers_of(tensor.device_mesh), splits)
    _check_local_shape(name, tensor, layout)
    return layout


def _check_local_shape(name: str, tensor: DTensor, layout: Layout) -> None:
    expected = tuple(length(runs) for runs in runs_of(layout, this_rank()))
    shape = tuple(tensor._local_tensor.shape)
    if shape != expected and this_rank() in layout.mesh:
        raise ValueError(
            f"{name} {layout.shape} has a part {shape} on rank {this_rank()}, where its placements {tensor.placements} "
            f"on a mesh of ranks {layout.mesh.ranks} say {expected}. fully_shard goes by the order of the ranks in "
            "their group: give it a mesh whose ranks rise. DTensor.from_local takes parts only as torch.chunk cuts them"
        )


def memory_beside(p: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory for a tensor that lies like `p`: on its device, split over its mesh alike, and in its order.

    It has the dimensions of `p`, each split by its size in `shape`: a dimension of size 1 lies with the ranks that hold
    the beginning of that dimension of `p`.
    """
    order = sorted(range(p.ndim), key=p.stride, reverse=True)
    if not isinstance(p, DTensor):
        return torch.empty_permuted(shape, order, dtype=dtype, device=p.device)
    layout = layout_of("", p)._replace(shape=tuple(shape))
    sizes = [length(runs) for runs in runs_of(layout, this_rank())]
    local = torch.empty_permuted(sizes, order, dtype=dtype, device=p.device)
    whole = torch.empty_permuted(shape, order, device="meta")
    lies = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
    return DTensor.from_local(local, p.device_mesh, p.placements, **lies)


def facts_of(params: Sequence[Tensor]) -> list[Any]:
    """Return what a plan depends on of how `params` lie, in a flat list, to compare with what it was.

    A DTensor is asked for its part, which answers sooner than it does; its specification is an object that stays.
    """
    kinds, parts, specs = list(map(type, params)), params, []
    if has_shards(kinds):
        parts, specs = list(map(local_part, params)), [p._spec for p in params if isinstance(p, DTensor)]
    return [*kinds, *specs, *map(_DEVICE, parts), *map(_DTYPE, parts), *map(_SHAPE, parts), *map(_STRIDES, parts)]


def lie_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors lie on ranks in the same way."""
    if not isinstance(a, DTensor) or not isinstance(b, DTensor):
        return isinstance(a, DTensor) == isinstance(b, DTensor)
    if a._local_tensor.shape != b._local_tensor.shape:
        return False
    a, b = a._spec, b._spec
    # The same object nearly always, and DTensors compare their meshes rank by rank.
    return a.placements == b.placements and (a.mesh is b.mesh or a.mesh == b.mesh)


def has_shards(kinds: Iterable[type]) -> bool:
    """Return whether any of the types of tensors is that of a DTensor."""
    return any(issubclass(kind, DTensor) for kind in set(kinds))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory, and a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@functools.lru_cache(maxsize=2**16)
def runs_of(layout: Layout, rank: int) -> tuple[Runs, ...]:
    """Return, for each dimension of the tensor, the indices that `rank` holds: none if it is not in the mesh."""
    if rank not in layout.mesh:
        return ((),) * len(layout.shape)
    runs_by_dim = [((0, size),) for size in layout.shape]
    for split, parts, index in zip(layout.splits, layout.mesh.shape, layout.mesh.coordinates(rank)):
        if split is not None:
            dim, factor = split
            pieces = [_chunk(runs_by_dim[dim], factor, piece) for piece in range(factor)]
            runs_by_dim[dim] = tuple(run for piece in pieces for run in _chunk(piece, parts, index))
    return tuple(_joined(runs) for runs in runs_by_dim)


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
    chunk, passed = [], 0
    for start, stop in runs:
        a, b = max(first - passed, 0), min(last - passed, stop - start)
        if a < b:
            chunk.append((start + a, start + b))
        passed += stop - start
    return tuple(chunk)


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
        if mesh.get_coordinate() is not None:  # this rank is in it, and in a group along each of its dimensions
            for dim in range(mesh.ndim):
                offer_group(mesh.get_group(dim))
    return _MESHES[mesh]


def _split_of(name: str, placement) -> Optional[tuple[int, int]]:
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):  # before Shard, which it is a kind of in some versions of torch
        return placement.dim, placement.split_factor
    if isinstance(placement, Shard):
        return placement.dim, 1
    raise ValueError(f"{name} has a placement {placement}, which is neither Replicate nor Shard")
