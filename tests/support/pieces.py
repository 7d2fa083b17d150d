"""What ranks have of tensors, sent to nobody but the test's process, which puts wholes together."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.rank_pool import device_of_ranks


class Trained(NamedTuple):
    """Whole parameters and their state, key by key, and which holder has each element of a parameter; on the CPU."""

    parameters: list[Tensor]
    state: list[dict[str, Tensor]]
    holders: list[Tensor]


class Piece(NamedTuple):
    """What a rank has of a tensor, on the CPU: values, their places in the whole, and of which copy they are."""

    values: Tensor
    places: Tensor
    shape: torch.Size
    copy: tuple[int, ...]


class Pieces(NamedTuple):
    """What a rank has of all parameters, of their state, and of the numbers of their holders."""

    parameters: list[Piece]
    state: list[dict[str, Piece]]
    holders: list[Piece]


def piece_of(value: Tensor) -> Piece:
    """Return what this rank has of a tensor; nothing is sent."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return Piece(value.cpu().reshape(-1), torch.arange(value.numel()), value.shape, (dist.get_rank(),))
    mesh, placements = value.device_mesh, tuple(value.placements)
    copy = tuple(i for i, placement in zip(mesh.get_coordinate(), placements) if isinstance(placement, Replicate))
    places = _places(value.shape, tuple(mesh.shape), placements)
    return Piece(value._local_tensor.cpu().reshape(-1), places, value.shape, copy)


def put_together(ranks: Sequence[Pieces]) -> list[Trained]:
    """Return, for each rank, the wholes of its copies, from the pieces of all ranks."""
    parameters = [_wholes(of_ranks) for of_ranks in zip(*(rank.parameters for rank in ranks))]
    holders = [_wholes(of_ranks) for of_ranks in zip(*(rank.holders for rank in ranks))]
    states = []
    for of_ranks in zip(*(rank.state for rank in ranks)):
        keys = {frozenset(state) for state in of_ranks}
        assert len(keys) == 1, f"ranks have other states of one parameter: {keys}"
        states.append({key: _wholes([state[key] for state in of_ranks]) for key in of_ranks[0]})
    return [
        Trained(
            [wholes[rank] for wholes in parameters],
            [{key: wholes[rank] for key, wholes in state.items()} for state in states],
            [wholes[rank] for wholes in holders],
        )
        for rank in range(len(ranks))
    ]


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh of this shape over all ranks; made once, as groups are."""
    assert math.prod(shape) == dist.get_world_size()
    return init_device_mesh(device_of_ranks(), shape, mesh_dim_names=tuple("xyz")[: len(shape)])


def _wholes(of_ranks: Sequence[Piece]) -> list[Tensor]:
    """Return for each rank the whole to which its piece belongs."""
    copies: dict[tuple[int, ...], list[Piece]] = {}
    for piece in of_ranks:
        copies.setdefault(piece.copy, []).append(piece)
    assert len({piece.shape for piece in of_ranks}) == 1
    joined = {copy: _joined(pieces) for copy, pieces in copies.items()}
    return [joined[piece.copy] for piece in of_ranks]


def _joined(pieces: Sequence[Piece]) -> Tensor:
    """Return a whole; AssertionError unless the pieces of one copy have each element of it once."""
    places = torch.cat([piece.places for piece in pieces])
    assert torch.equal(places.sort().values, torch.arange(pieces[0].shape.numel()))
    whole = pieces[0].values.new_empty(pieces[0].shape)
    whole.view(-1)[places] = torch.cat([piece.values for piece in pieces])
    return whole


@functools.cache
def _places(shape: torch.Size, mesh: tuple[int, ...], placements: tuple[Any, ...]) -> Tensor:
    """Return the places in a whole of what this rank has of it."""
    with _disable_current_modes():  # a modelled device's mode would take these numbers, which are on the CPU
        numbers = torch.arange(shape.numel(), device=device_of_ranks()).view(shape)
        return distribute_tensor(numbers, mesh_of(mesh), placements, src_data_rank=None)._local_tensor.cpu().reshape(-1)
