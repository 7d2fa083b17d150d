"""How a sharded parameter is laid out on ranks. No other file interprets the placements of a DTensor."""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from operator import attrgetter
from typing import Any, Iterable, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..parameters.matrices import part_here
from ..parameters.sequences import grouped
from .process_groups import Ranks, this_rank
from .runs import Runs, chunk, joined, length

# What `LaidOut` has of each tensor. Every step reads it from thousands: with `map` no Python code runs for each.
_READ = attrgetter("device"), attrgetter("dtype"), attrgetter("shape"), Tensor.stride

# The mesh of each device mesh. Weak, because a device mesh keeps its process groups alive.
_MESHES: weakref.WeakKeyDictionary[DeviceMesh, Mesh] = weakref.WeakKeyDictionary()


class Mesh:
    """The ranks of a mesh of `shape`, in the order of their coordinates. Equal meshes are one object (`mesh_of`)."""

    def __init__(self, shape: tuple[int, ...], ranks: tuple[int, ...]):
        self.shape = shape
        self.ranks = ranks
        self.members = tuple(sorted(ranks))
        self._position = {rank: i for i, rank in enumerate(ranks)}
        self.digest = f"{zlib.crc32(repr(ranks).encode()):08x}"

    def __contains__(self, rank: int) -> bool:
        return rank in self._position

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of `rank` in each dimension."""
        indices, position = [], self._position[rank]
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            indices.append(index)
        return tuple(reversed(indices))


class Layout(NamedTuple):
    """How a tensor of `shape` is laid out on a mesh, in numbers that are the same on every rank.

    Each mesh dimension either replicates the tensor (None) or splits one of its dimensions as `torch.chunk` does. If
    the factor f is above 1, that dimension is first cut into f pieces, and each piece is split over the mesh dimension
    (torch's `_StridedShard`). FSDP2 uses this for what tensor parallelism has already split.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    splits: tuple[Optional[tuple[int, int]], ...]  # for each mesh dimension: dimension of the tensor and factor

    @property
    def copies(self) -> int:
        """How many copies of the tensor there are."""
        return math.prod(size for size, split in zip(self.mesh.shape, self.splits) if split is None)

    @property
    def split_dims(self) -> set[int]:
        """The dimensions of the tensor that are split over ranks."""
        return {split[0] for split in self.splits if split is not None}

    def copy_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of the copy to which the part of `rank` belongs."""
        coordinates = zip(self.splits, self.mesh.coordinates(rank))
        return tuple(index for split, index in coordinates if split is None)

    def ranks_by_copy(self, ranks: Iterable[int]) -> list[Ranks]:
        """Return those of `ranks` that have parts of each copy, in the order in which copies come first."""
        return list(map(tuple, grouped(ranks, self.copy_of)))

    def part_of(self, rank: int) -> int:
        """Return the number of the part that `rank` has, counted from 0. Copies of one part have the same number."""
        number = 0
        for split, size, index in zip(self.splits, self.mesh.shape, self.mesh.coordinates(rank)):
            number = number if split is None else number * size + index
        return number


@functools.cache
def mesh_of(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Mesh:
    """Return the mesh with these sizes and ranks, the same object each time."""
    return Mesh(shape, ranks)


def layout_of(name: str, tensor: Tensor, ranks: Optional[tuple[int, ...]] = None) -> Optional[Layout]:
    """Return the layout of a DTensor, or of a plain tensor that each of `ranks` has a copy of; else None.

    Raises ValueError for a DTensor with Partial placements, or whose local part does not have the shape that its
    placements say; RuntimeError if that is because the process group was destroyed.
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
    """Raise as `layout_of` does if this rank's part does not have the shape that placements say."""
    expected = tuple(length(runs) for runs in runs_of(layout, this_rank()))
    shape = tuple(tensor._local_tensor.shape)
    both_empty = 0 in shape and 0 in expected  # fully_shard drops the rows of a part that lacks only columns
    if shape != expected and not both_empty and this_rank() in layout.mesh:
        if not dist.is_initialized():  # then every rank counts as rank 0
            raise RuntimeError(f"{name} is sharded, and its process group was destroyed: use the optimizer before that")
        raise ValueError(
            f"{name} {layout.shape} has a part {shape} on rank {this_rank()}, where its placements {tensor.placements} "
            f"on a mesh of ranks {layout.mesh.ranks} say {expected}. fully_shard goes by the order of the ranks in "
            "their group: give it a mesh with ranks in ascending order. Over tensor parallelism its parts are what "
            "placements say only if the size divides evenly: pad it. from_local takes parts as torch.chunk cuts them"
        )


def memory_beside(p: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory of `shape` that is laid out like `p`: same device, mesh, placements, order in memory.

    It has the same number of dimensions as `p`. Each is split by its own size: a dimension of size 1 goes to the ranks
    that hold the beginning of that dimension of `p`.
    """
    order = sorted(range(p.ndim), key=part_here(p).stride, reverse=True)
    if not isinstance(p, DTensor):
        return torch.empty_permuted(shape, order, dtype=dtype, device=p.device)
    layout = layout_of("", p)._replace(shape=tuple(shape))
    sizes = [length(runs) for runs in runs_of(layout, this_rank())]
    local = torch.empty_permuted(sizes, order, dtype=dtype, device=p.device)
    strides = torch.empty_permuted(shape, order, device="meta").stride()
    return DTensor.from_local(local, p.device_mesh, p.placements, shape=torch.Size(shape), stride=strides)


class LaidOut(NamedTuple):
    """How tensors are laid out: everything about it that a plan depends on."""

    kinds: list[type]
    specs: list[Any]  # of those that are DTensors
    read: list[list[Any]]  # a list of each of `_READ`

    @property
    def has_shards(self) -> bool:
        """Whether any of the tensors is a DTensor."""
        return bool(self.specs)

    def describes(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors, which are as many, are laid out in this way."""
        if list(map(type, tensors)) != self.kinds:
            return False
        parts, specs = _parts_and_specs(tensors, self.has_shards)
        # A list at a time: tuples by the thousand would set off the garbage collector.
        return specs == self.specs and all(list(map(read, parts)) == known for read, known in zip(_READ, self.read))


def laid_out(tensors: Sequence[Tensor]) -> LaidOut:
    """Return how `tensors` are laid out."""
    kinds = list(map(type, tensors))
    parts, specs = _parts_and_specs(tensors, has_shards(kinds))
    return LaidOut(kinds, specs, [list(map(read, parts)) for read in _READ])


def _parts_and_specs(tensors: Sequence[Tensor], sharded: bool) -> tuple[Sequence[Tensor], list[Any]]:
    """Return the local tensors, which answer faster than DTensors, and the specs of DTensors."""
    if not sharded:
        return tensors, []
    return list(map(local_part, tensors)), [each._spec for each in tensors if isinstance(each, DTensor)]


def lie_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors lie on ranks in the same way."""
    if not isinstance(a, DTensor) or not isinstance(b, DTensor):
        return isinstance(a, DTensor) == isinstance(b, DTensor)
    if a._local_tensor.shape != b._local_tensor.shape:
        return False
    a, b = a._spec, b._spec
    # The same object nearly always, and DTensors compare their meshes rank by rank.
    return a.placements == b.placements and (a.mesh is b.mesh or a.mesh == b.mesh)


def are_on_one_mesh(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are DTensors on one device mesh."""
    return isinstance(a, DTensor) and isinstance(b, DTensor) and a.device_mesh == b.device_mesh


def lies_beside(name: str, value: Tensor, p: Tensor) -> bool:
    """Return whether every rank has the part of `value` that `memory_beside` would give it; True for plain tensors.

    Errors of `layout_of` call `value`, which has as many dimensions as `p`, by `name`. Unequal placements may mean the
    same parts, as on a mesh of one rank.
    """
    if not isinstance(value, DTensor) or not isinstance(p, DTensor):
        return True
    there, wanted = layout_of(name, value), layout_of("", p)._replace(shape=tuple(value.shape))
    ranks = {*there.mesh.ranks, *wanted.mesh.ranks}
    return there == wanted or all(runs_of(there, rank) == runs_of(wanted, rank) for rank in ranks)


def groups_of(tensors: Iterable[Tensor]) -> list[dist.ProcessGroup]:
    """Return the process groups along the dimensions of the meshes of DTensors, as far as this rank is in them."""
    if dist.group.WORLD is None:
        return []
    meshes = {id(each.device_mesh): each.device_mesh for each in tensors if isinstance(each, DTensor)}  # equal ones too
    here = [mesh for mesh in meshes.values() if mesh.get_coordinate() is not None]
    return [mesh.get_group(dim) for mesh in here for dim in range(mesh.ndim)]


def has_shards(kinds: Iterable[type]) -> bool:
    """Return whether any of these types is DTensor or a subclass."""
    return any(issubclass(kind, DTensor) for kind in set(kinds))


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, sharing its memory; a plain tensor is returned as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@functools.lru_cache(maxsize=2**16)
def runs_of(layout: Layout, rank: int) -> tuple[Runs, ...]:
    """Return the indices that `rank` holds of each dimension of the tensor: none if it is not in the mesh."""
    if rank not in layout.mesh:
        return ((),) * len(layout.shape)
    runs_by_dim = [((0, size),) for size in layout.shape]
    for split, parts, index in zip(layout.splits, layout.mesh.shape, layout.mesh.coordinates(rank)):
        if split is not None:
            dim, factor = split
            pieces = [chunk(runs_by_dim[dim], factor, piece) for piece in range(factor)]
            runs_by_dim[dim] = tuple(run for piece in pieces for run in chunk(piece, parts, index))
    return tuple(joined(runs) for runs in runs_by_dim)


def _numbers_of(mesh: DeviceMesh) -> Mesh:
    if mesh not in _MESHES:
        _MESHES[mesh] = mesh_of(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    return _MESHES[mesh]


def _split_of(name: str, placement) -> Optional[tuple[int, int]]:
    """Return what a placement splits, and how, as `Layout.splits` has it; ValueError for one that is unknown."""
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):  # tested before Shard, of which it is a subclass in some torch versions
        return placement.dim, placement.split_factor
    if isinstance(placement, Shard):
        return placement.dim, 1
    raise ValueError(f"{name} has a placement {placement}, which is neither Replicate nor Shard")
