"""`momentum_pack_` in torch's functions; its contract is in `kernels/native.py`."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..formats import BLOCK
from .arithmetic import computing_dtype, lerp
from .memory import Memory
from .norms import check_norms_of, norms_of_wide_
from .pieces import Gate, Piece, on_device, parts_of, pieces, stacked, write_
from .quantization import dequantized, quantized
from .refusals import (
    check_buffer,
    check_device,
    check_gate,
    check_matrices,
    check_matrix,
    check_numbers,
    check_shape,
    dtype_of,
    name_of,
    shown,
)

SCHEMA = (
    "(Tensor(a!)[] momentum, Tensor[] gradient, Tensor(b!) packed, float beta, bool nesterov, bool maximize=False, *, "
    "int[]? offsets=None, Tensor? active=None, Tensor? grad_scale=None, Tensor? found_inf=None, "
    "Tensor(c!)[]? momentum_scale=None, Tensor(d!)? norms=None) -> ()"
)


class _Lists(NamedTuple):
    """The matrices of a call, with blocks of 8-bit momentum along rows; `scales` are None for floating momentum."""

    momentum: Sequence[Tensor]
    gradient: Sequence[Tensor]
    packed: Sequence[Tensor]
    scales: Optional[Sequence[Tensor]]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        return computing_dtype(*(dtype_of(matrices) for matrices in self[:3]))

    def momentum_of(self, piece: Piece) -> Tensor:
        """Return the values of momentum (k, rows, cols) in the dtype of the arithmetic."""
        momentum = stacked(self.momentum, piece)
        if self.scales is None:
            return momentum.to(self.dtype)
        return dequantized(momentum, stacked(self.scales, piece), self.dtype)

    def keep_(self, piece: Piece, momentum: Tensor, is_open: Optional[Tensor]) -> None:
        """Write new momentum, where `is_open`."""
        if self.scales is not None:
            momentum, scales = quantized(momentum)
            write_(self.scales, piece, scales, is_open)
        write_(self.momentum, piece, momentum, is_open)


def momentum_pack_(
    momentum: Sequence[Tensor],
    gradient: Sequence[Tensor],
    packed: Tensor,
    beta: float,
    nesterov: bool,
    maximize: bool = False,
    *,
    offsets: Optional[Sequence[int]] = None,
    active: Optional[Tensor] = None,
    grad_scale: Optional[Tensor] = None,
    found_inf: Optional[Tensor] = None,
    momentum_scale: Optional[Sequence[Tensor]] = None,
    norms: Optional[Tensor] = None,
) -> None:
    """Update momentum in place and write each matrix's direction into `packed`, and its norm into `norms`."""
    _check_lists(momentum, gradient, packed, momentum_scale, beta)
    check_buffer("packed", packed, momentum, offsets)
    check_norms_of("packed", packed, offsets, norms)
    _check_memory(momentum, gradient, packed, momentum_scale, norms, (active, grad_scale, found_inf))
    if grad_scale is not None:
        check_numbers("grad_scale", grad_scale, 1, packed)
    check_gate(active, found_inf, len(momentum), packed)
    lists = _lists(momentum, gradient, parts_of(packed, momentum, offsets), momentum_scale)
    gate = Gate.on(packed.device, active, found_inf)
    scale = None if grad_scale is None else on_device(grad_scale.reshape(-1), packed.device, lists.dtype)
    for piece in pieces(lists.momentum):
        is_open = gate.is_open(piece)
        g = stacked(lists.gradient, piece).to(lists.dtype)
        g = g if scale is None else g / scale
        g = -g if maximize else g
        m = lerp(lists.momentum_of(piece), g, 1 - beta)
        u = lerp(m, g, 1 - beta) if nesterov else m
        lists.keep_(piece, m, is_open)
        write_(lists.packed, piece, u if is_open is None else u.masked_fill(~is_open, 0))
    if norms is not None:
        norms_of_wide_(norms, packed)


def _lists(
    momentum: Sequence[Tensor], gradient: Sequence[Tensor], packed: Sequence[Tensor], scales: Optional[Sequence[Tensor]]
) -> _Lists:
    """Return the matrices, those transposed that have blocks along their columns."""
    if scales is None:
        return _Lists(momentum, gradient, packed, None)
    by_columns = [not _has_blocks_along_rows(m, s) for m, s in zip(momentum, scales)]
    lists = momentum, gradient, packed, scales
    return _Lists(*([t.mT if transposed else t for t, transposed in zip(each, by_columns)] for each in lists))


def _check_lists(
    momentum: Sequence[Tensor],
    gradient: Sequence[Tensor],
    packed: Tensor,
    scales: Optional[Sequence[Tensor]],
    beta: float,
) -> None:
    if len(gradient) != len(momentum):
        counts = f"{len(gradient)} and {len(momentum)}"
        raise RuntimeError(f"need as many gradients as momentum matrices, got {counts}")
    if not 0 <= beta <= 1:
        raise RuntimeError(f"beta must be from 0 to 1, got {beta:g}")
    if scales is None:
        check_matrices("momentum", momentum, packed)
    else:
        _check_codes(momentum, scales, packed)
    check_matrices("gradient", gradient, packed)


def _check_codes(momentum: Sequence[Tensor], scales: Sequence[Tensor], packed: Tensor) -> None:
    if len(scales) != len(momentum):
        raise RuntimeError(f"momentum_scale must be one per matrix, {len(momentum)}, got {len(scales)}")
    for i, (m, s) in enumerate(zip(momentum, scales)):
        for name, t in ("momentum", m), ("momentum_scale", s):
            check_matrix(name, t, i)
            check_device(name, t, packed)
        if (m.dtype, s.dtype) != (torch.int8, torch.float32):
            raise RuntimeError(
                f"momentum[{i}] must be Char and momentum_scale[{i}] Float, "
                f"got {name_of(m.dtype)} and {name_of(s.dtype)}"
            )
        if not _has_blocks_along_rows(m, s) and not _has_blocks_along_rows(m.mT, s.mT):
            raise RuntimeError(
                f"momentum_scale[{i}] must have an element for each {BLOCK} of a row or of a column of "
                f"{shown(m.shape)}, got {shown(s.shape)}"
            )


def _has_blocks_along_rows(momentum: Tensor, scale: Tensor) -> bool:
    rows, cols = momentum.shape
    return scale.shape == (rows, -(-cols // BLOCK))


def _check_memory(
    momentum: Sequence[Tensor],
    gradient: Sequence[Tensor],
    packed: Tensor,
    scales: Optional[Sequence[Tensor]],
    norms: Optional[Tensor],
    others: tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]],
) -> None:
    memory = Memory()
    memory.write("packed", packed)
    for i, (m, g) in enumerate(zip(momentum, gradient)):
        check_shape(f"gradient[{i}]", g, m, "its momentum")
        memory.write("momentum", m, i)
        memory.read("gradient", g, i)
        if scales is not None:
            memory.write("momentum_scale", scales[i], i)
    if norms is not None:
        memory.write("norms", norms)
    for name, t in zip(("active", "grad_scale", "found_inf"), others):
        memory.read(name, t)
    memory.check()
