"""CUDA graphs from packed momentum to updates, one for each kind of chain: a replay is one launch.

    gradients ─ momentum ─► directions ═ graph: normalise, products ═► updates ─ descent ─► parameters

A chain is a batch, or several that share products (`plan.batches.chains`). Everything that may change from step to
step (learning rates, gradient scales, missing or released gradients, offloaded momentum) is handled before or after
the graph. Chains take turns on one stream, so all graphs of an optimizer on one device read one buffer, write another,
and share one pool for temporary tensors. Each also reads the norms of its directions, from a buffer of its own.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Iterable, NamedTuple, Sequence

import torch
from torch import Tensor

from ..iteration import Iteration
from ..kernels.autocast import without_autocast
from ..kernels.formats import float32_roundoffs
from ..kernels.graphs import captured
from ..kernels.memory_parts import DEVICE_ALIGNMENT, Part, bytes_of, parts_of
from ..kernels.user_warnings import warn_user
from ..parameters.settings import Group
from ..plan.batches import Batch, Chain
from ..rules.equalization import Equalization
from ..tuning.race import error_described, loses_gpu
from ..tuning.tune import Stage
from .batch_memory import BatchMemory
from .polar_update import Packed, PackedChain, as_parameter, norms_memory, packed_memory, polar_updates


class BatchToPack(NamedTuple):
    """What a step packs of a batch: `count` of its matrices, those that have gradients."""

    batch: Batch
    count: int
    eps: float


class Kind(NamedTuple):
    """The kind of batch that a graph is captured for."""

    count: int  # of matrices
    packed_shape: tuple[int, int]
    transposed: bool
    packed_dtype: torch.dtype
    iteration: Iteration
    equalization: Equalization
    eps: float
    device: torch.device
    roundoffs: tuple[float, ...]  # of torch's float32 products, which a setting of torch's changes; () without any

    def __str__(self) -> str:
        return f"{self.count} x {self.packed_shape[0]} x {self.packed_shape[1]} {self.iteration}{self.equalization}"


# The kinds of a chain's batches.
Kinds = tuple[Kind, ...]


class UpdateGraphs:
    """The graphs of one optimizer; without any, as before a warm-up, every chain is updated eagerly."""

    def __init__(self) -> None:
        self._replays: dict[Kinds, PackedChain] = {}
        self._host = BatchMemory()

    def packed(self, chain: Sequence[BatchToPack]) -> PackedChain:
        """Return where matrices of a chain's batches are to be packed, and what then updates them.

        That is a graph if one was captured for these. On a CPU batches take turns in one memory. So updates there are
        valid until the next batch, as those of graphs are until the next replay.
        """
        replay = self._replays.get(kinds_of(chain)) if self._replays else None
        if replay is not None and not torch.cuda.is_current_stream_capturing():
            return replay
        members = [self._eager(*each) for each in chain]
        return PackedChain(members, partial(polar_updates, members))

    def _eager(self, batch: Batch, count: int, eps: float) -> Packed:
        """Return memory for matrices of a batch that no graph updates."""
        if batch.device.type == "cpu":
            directions, *memory = self._host.views(batch, count)
        else:  # torch keeps the memory of such devices for the next batch
            directions = packed_memory(batch, count)
            memory = (_factors_like(directions, batch),)
        return Packed(batch, eps, directions, norms_memory(batch, directions), *memory)

    def drop(self) -> None:
        """Forget all graphs, whose memory torch then uses for others."""
        self._replays = {}

    def drop_unused(self, chains: Iterable[Chain], groups: Sequence[Group]) -> None:
        """Forget the graphs that fit no chain, and warn: these are eager until a warm-up."""
        used = {_whole(chain, groups) for chain in chains} if self._replays else ()
        unused = [kinds for kinds in self._replays if kinds not in used]
        if unused:
            self._replays = {kinds: replay for kinds, replay in self._replays.items() if kinds not in unused}
            warn_user(
                f"{len(unused)} of the CUDA graphs that warmup() captured no longer fit what steps do, as for "
                f"{_shown(unused[0])}: parameters, settings or the choice of kernels have changed. They are "
                "launched eagerly until you call warmup() again",
                RuntimeWarning,
            )

    def described(self, chains: Iterable[Chain], groups: Sequence[Group]) -> list[str]:
        """Return a line with the number of captured batches among those that could be; an empty list if none could."""
        able = [_whole(chain, groups) for chain in chains if can_capture(chain[0].device)]
        replayed, count = sum(len(kinds) for kinds in able if kinds in self._replays), sum(map(len, able))
        return [f"{replayed} of {count} batches replay a CUDA graph, captured by warmup()"] if able else []

    def stages(self, chains: Iterable[Chain], groups: Sequence[Group]) -> list[Stage]:
        """Return stages that capture a graph for each kind of whole chain on GPUs, after `drop`.

        Each returns what it has done.
        """
        whole_chains = {_whole(chain, groups): chain for chain in chains if can_capture(chain[0].device)}
        buffers: dict[torch.device, _Buffers] = {}
        captures = [partial(self._capture, kinds, chain, buffers) for kinds, chain in whole_chains.items()]
        return [partial(_make_room, list(whole_chains), buffers), *captures] if whole_chains else []

    def _capture(self, kinds: Kinds, chain: Chain, buffers: dict[torch.device, _Buffers]) -> str:
        """Capture a graph, and keep it if its bits are those of the eager update."""
        device = kinds[0].device
        members = [_packed(*each) for each in zip(chain, kinds, buffers[device].views(kinds))]
        for member in members:
            member.directions.normal_(generator=torch.Generator(device).manual_seed(0))
        updates = [as_parameter(member.batch, member.factors) for member in members]
        with torch.no_grad(), without_autocast(device.type):
            expected = polar_updates(
                [each._replace(norms=None, factors=_factors_like(each.directions, each.batch)) for each in members]
            )

            def replay() -> list[Tensor]:
                start()
                return updates

            for member in members:
                member.take_norms_()
            try:
                start = captured(partial(polar_updates, members), device, buffers[device].pool)
            except RuntimeError as error:
                if loses_gpu(error):
                    raise
                return self._left_eager(kinds, buffers[device], f"it cannot be captured ({error_described(error)})")
            for member in members:
                member.factors.fill_(math.nan)
            start()
        if not all(map(torch.equal, updates, expected)):
            return self._left_eager(kinds, buffers[device], "a CUDA graph gives other bits than eager launches")
        self._replays[kinds] = PackedChain(members, replay)
        return f"capture {_shown(kinds)}"

    def _left_eager(self, kinds: Kinds, buffers: _Buffers, why: str) -> str:
        """Warn that a chain has no graph, and why; return what the stage did, in words."""
        # Torch takes no other graph into the pool of a capture that broke, nor into one that has lost its last graph.
        buffers.take_pool()
        warn_user(f"{_shown(kinds)} is launched eagerly: {why}", RuntimeWarning)
        return f"eager {_shown(kinds)}"


class _Buffers:
    """Shared by all graphs on a device: memory for directions and factors, and the pool of temporary memory."""

    def __init__(self, device: torch.device, of_chains: Sequence[Kinds]):
        self._directions, self._factors = (
            torch.empty(max(bytes_of(parts, DEVICE_ALIGNMENT) for parts in of_all), dtype=torch.uint8, device=device)
            for of_all in zip(*map(_parts, of_chains))
        )
        self.take_pool()

    def take_pool(self) -> None:
        """Let the next graphs have a new pool."""
        self.pool = torch.cuda.graph_pool_handle() if self._factors.is_cuda else None

    def views(self, kinds: Kinds) -> list[tuple[Tensor, Tensor]]:
        """Return the directions and the factors (B, m, n) of a chain's kinds."""
        directions, factors = _parts(kinds)
        views = parts_of(self._directions, directions, DEVICE_ALIGNMENT)
        return list(zip(views, parts_of(self._factors, factors, DEVICE_ALIGNMENT)))


def _make_room(of_chains: Sequence[Kinds], buffers: dict[torch.device, _Buffers]) -> str:
    """Put memory for the graphs of some chains into `buffers`; return what was done."""
    for device in {kinds[0].device for kinds in of_chains}:
        buffers[device] = _Buffers(device, [kinds for kinds in of_chains if kinds[0].device == device])
    return f"memory for {len(of_chains)} CUDA graphs"


def _parts(kinds: Kinds) -> tuple[list[Part], list[Part]]:
    """Return the shape and dtype of each kind's directions, and those of its factors."""
    sizes = [(kind.count, *kind.packed_shape) for kind in kinds]
    return (
        [(size, kind.packed_dtype) for size, kind in zip(sizes, kinds)],
        [(size, kind.iteration.work_dtype) for size, kind in zip(sizes, kinds)],
    )


def _factors_like(directions: Tensor, batch: Batch) -> Tensor:
    """Return new memory for factors in the order of directions: torch's products round by the order of what they write.

    Eager launches write to such memory, as graphs write to theirs, so both give the same bits.
    """
    return torch.empty_like(directions, dtype=batch.iteration.work_dtype)


def can_capture(device: torch.device) -> bool:
    """Whether there are graphs on `device`."""
    return device.type == "cuda"


def kinds_of(chain: Iterable[BatchToPack]) -> Kinds:
    """Return the kinds of the batches of a chain."""
    return tuple(
        Kind(
            count,
            b.packed_shape,
            b.transposed,
            b.packed_dtype,
            b.iteration,
            b.equalization,
            eps,
            b.device,
            float32_roundoffs() if b.iteration.chain_dtype == torch.float32 else (),  # work in float32 has one
        )
        for b, count, eps in chain
    )


def _whole(chain: Chain, groups: Sequence[Group]) -> Kinds:
    """Return the kinds of a chain whose matrices all have gradients."""
    return kinds_of(
        BatchToPack(batch, len(batch.matrices), groups[batch.first.parameter.group]["eps"]) for batch in chain
    )


def _packed(batch: Batch, kind: Kind, views: tuple[Tensor, Tensor]) -> Packed:
    directions, factors = views
    return Packed(batch, kind.eps, directions, norms_memory(batch, directions), factors)


def _shown(kinds: Kinds) -> str:
    return " with ".join(map(str, kinds))
