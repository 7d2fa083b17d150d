"""CUDA graphs from packed momentum to updates, one for each kind of batch: a replay is one launch.

    gradients ─ momentum ─► directions ═ graph: normalise, products ═► updates ─ descent ─► parameters

What schedulers and scalers change, and what is missing, offloaded or released, lies before or behind a graph. Batches
take turns on one stream, so all graphs of an optimizer on one device read one buffer, write another, and share one pool
for what lies between. Each also reads the norms of its directions, from a buffer of its kind.
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Iterable, NamedTuple, Sequence

import torch
from torch import Tensor

from ..iteration import Iteration
from ..kernels.autocast import without_autocast
from ..kernels.graphs import captured
from ..parameters.settings import Group
from ..plan.batches import Batch
from ..rules.equalization import Equalization
from ..tuning.race import described, loses_gpu
from ..tuning.tune import Stage
from .batch_memory import BatchMemory
from .polar_update import Packed, as_parameter, norms_memory, packed_memory, polar_update


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

    @property
    def bytes(self) -> tuple[int, int]:
        """Of its directions and of its updates."""
        elements = self.count * math.prod(self.packed_shape)
        return elements * self.packed_dtype.itemsize, elements * self.iteration.work_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.count} x {self.packed_shape[0]} x {self.packed_shape[1]} {self.iteration}{self.equalization}"


class UpdateGraphs:
    """The graphs of one optimizer; without any, as before a warm-up, every batch is updated eagerly."""

    def __init__(self) -> None:
        self._replays: dict[Kind, Packed] = {}
        self._host = BatchMemory()

    def packed(self, batch: Batch, count: int, eps: float) -> Packed:
        """Return where `count` matrices of a batch are to be packed, and what then updates them.

        That is a graph if one was captured for as many matrices and this `eps`. On a CPU batches take turns in one
        memory. So updates there hold until the next batch, as those of graphs hold until the next replay.
        """
        replay = self._replays.get(kind_of(batch, count, eps)) if self._replays else None
        if replay is not None and not torch.cuda.is_current_stream_capturing():
            return replay
        if batch.device.type == "cpu":
            directions, *memory = self._host.views(batch, count)
        else:  # torch keeps the memory of such devices for the next batch
            directions, memory = packed_memory(batch, count, batch.device), ()
        norms = norms_memory(batch, directions)
        return Packed(directions, norms, partial(polar_update, batch, directions, eps, norms, *memory))

    def described(self, batches: Iterable[Batch], groups: Sequence[Group]) -> list[str]:
        """Return a line with the number of captured batches among those that could be; an empty list if none could."""
        kinds = [_whole(batch, groups) for batch in batches if can_capture(batch.device)]
        replayed = sum(kind in self._replays for kind in kinds)
        return [f"{replayed} of {len(kinds)} batches replay a CUDA graph, captured by warmup()"] if kinds else []

    def stages(self, batches: Iterable[Batch], groups: Sequence[Group]) -> list[Stage]:
        """Return what captures a graph for each kind of whole batches on GPUs; the first lets go of all that are there.

        Each returns what it has done.
        """
        kinds = {_whole(batch, groups): batch for batch in batches if can_capture(batch.device)}
        buffers: dict[torch.device, _Buffers] = {}
        captures = [partial(self._capture, kind, batch, buffers) for kind, batch in kinds.items()]
        return [partial(self._make_room, list(kinds), buffers), *captures] if kinds else []

    def _make_room(self, kinds: Sequence[Kind], buffers: dict[torch.device, _Buffers]) -> str:
        self._replays = {}
        for device in {kind.device for kind in kinds}:
            buffers[device] = _Buffers(device, [kind for kind in kinds if kind.device == device])
        return f"memory for {len(kinds)} CUDA graphs"

    def _capture(self, kind: Kind, batch: Batch, buffers: dict[torch.device, _Buffers]) -> str:
        """Capture a graph, and keep it if its bits are those of the eager update."""
        directions, factors = buffers[kind.device].views(kind)
        directions.normal_(generator=torch.Generator(kind.device).manual_seed(0))
        updates, norms = as_parameter(batch, factors), norms_memory(batch, directions)
        with torch.no_grad(), without_autocast(kind.device.type):
            expected = polar_update(batch, directions, kind.eps)

            def replay() -> Tensor:
                start()
                return updates

            packed = Packed(directions, norms, replay)
            packed.take_norms_()

            try:
                update = partial(polar_update, batch, directions, kind.eps, norms, factors)
                start = captured(update, kind.device, buffers[kind.device].pool)
            except RuntimeError as error:
                if loses_gpu(error):
                    raise
                return _left_eager(kind, f"it cannot be captured ({described(error)})")
            factors.fill_(math.nan)
            start()
        if not torch.equal(updates, expected):
            return _left_eager(kind, "a CUDA graph gives other bits than eager launches")
        self._replays[kind] = packed
        return f"capture {kind}"


class _Buffers:
    """Shared by all graphs on a device: memory for directions and factors, and the pool of temporary memory."""

    def __init__(self, device: torch.device, kinds: Sequence[Kind]):
        sizes = [max(sizes) for sizes in zip(*(kind.bytes for kind in kinds))]
        self._directions, self._factors = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def views(self, kind: Kind) -> tuple[Tensor, Tensor]:
        """Return the directions and the factors (B, m, n) of a kind."""
        size, memory = (kind.count, *kind.packed_shape), (self._directions, self._factors)
        dtypes = kind.packed_dtype, kind.iteration.work_dtype
        directions, factors = (
            buffer[:length].view(dtype).view(size) for buffer, length, dtype in zip(memory, kind.bytes, dtypes)
        )
        return directions, factors


def can_capture(device: torch.device) -> bool:
    """Whether there are graphs on `device`."""
    return device.type == "cuda"


def _left_eager(kind: Kind, why: str) -> str:
    """Warn that a batch has no graph, and return that."""
    warnings.warn(f"{kind} is launched eagerly: {why}", RuntimeWarning, stacklevel=2)
    return f"eager {kind}"


def kind_of(batch: Batch, count: int, eps: float) -> Kind:
    """Return the kind of `count` matrices of a batch."""
    shape, dtype = (batch.packed_shape, batch.transposed), batch.packed_dtype
    return Kind(count, *shape, dtype, batch.iteration, batch.equalization, eps, batch.device)


def _whole(batch: Batch, groups: Sequence[Group]) -> Kind:
    """Return the kind of a batch whose matrices all have gradients."""
    return kind_of(batch, len(batch.matrices), groups[batch.first_group]["eps"])
