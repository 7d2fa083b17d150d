"""`momentum_pack_`: updates momentum in place, and packs the direction of each matrix into one buffer.

    g = ±gradient / grad_scale        minus if `maximize`
    m = lerp(m, g, 1 - beta)          written to `momentum`
    u = lerp(m, g, 1 - beta)          with `nesterov`, from the m just computed, before it is rounded; else m
    packed = u
    norms = |packed|_F                of each matrix

    lerp(m, g, w) = m + w (g - m)     and g for w = 1, where m may be infinite or NaN

- `momentum` and `gradient` are lists of B matrices of any strides. The momenta, the gradients and `packed` may have
  three dtypes, each float32, float64, float16 or bfloat16. Arithmetic is in float64 if any of them is float64, else in
  float32, and each result is rounded once.
- `packed` is (B, rows, cols) of any strides, such as the `.mT` of a contiguous buffer. With `offsets` (where each
  matrix begins, in elements) it is contiguous and 1-D, and matrices may differ in shape.
- `beta` is from 0 to 1. `grad_scale` (1) is float32 or float64, `active` (B) bool, `found_inf` (1) float32, all
  contiguous. Each may be on the CPU, where it is read at the call, or on the matrices' device, where the kernel reads
  it without a synchronization.
- A matrix that is not `active` keeps its momentum, and its packed part is zero. The same holds for all matrices if
  `found_inf` is not 0.
- `momentum_scale`, B float32 matrices, says that momentum has 8 bits: B int8 matrices of codes. Blocks of 64 neighbours
  share a scale. If they are neighbours in a row, scales are (rows, ceil(cols / 64)); if in a column,
  (ceil(rows / 64), cols). Then m = scale code |code|, with scale = max |m| / 127^2, at least 2^-126, and the nearest
  code. An element loses at most 1/126 of the largest magnitude of its block; `optimizer_common/quantize.h` has the
  bound of each. `packed` is computed from m before it is coded. A block that receives a NaN or an infinity stays NaN.
- `norms` (B), contiguous, are the norms of what is stored in `packed`, of the dtype and the bits that `frobenius_norm_`
  gives for it, or for its `.mT` if it has more rows than columns. Where `packed` is zero because of `active` or
  `found_inf`, so is the norm. Cannot be combined with `offsets` or with a `packed` of float64.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..formats import BLOCK, blocks_of
from .arithmetic import computing_dtype, lerp, number
from .memory import Memory
from .norms import check_norms_of, norms_of_wide_
from .pieces import Gate, Piece, on_device, parts_of, pieces, stacked, write_
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

# Of codes of 8 bits: the largest, and the smallest scale.
_LARGEST, _LEAST_SCALE = 127, 2.0**-126
# A little more than the largest square of a code, 127²: a quotient may be rounded up.
_MOST = 2.0**14


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
        return _dequantized(momentum, stacked(self.scales, piece), self.dtype)

    def keep_(self, piece: Piece, momentum: Tensor, is_open: Optional[Tensor]) -> None:
        """Write new momentum, where `is_open`."""
        if self.scales is not None:
            momentum, scales = _quantized(momentum)
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
    return scale.shape == (rows, blocks_of(cols))


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


def _dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scale code |code|, in `dtype`, of codes (k, rows, cols) with scales (k, rows, ceil(cols / 64))."""
    values = codes.to(dtype)
    return _of_elements(scale, codes).to(dtype) * (values * values.abs())


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, int8 of the shape of x (k, rows, cols), and scales, float32, with the nearest values to x."""
    blocks = torch.nn.functional.pad(x.abs(), (0, -x.size(-1) % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = (blocks.amax(-1) / number(_LARGEST**2, x)).float().clamp_min(_LEAST_SCALE)
    squares = (x.abs() / _of_elements(scale, x).to(x.dtype)).float()
    roots = torch.where(squares <= _MOST, squares, 0.0).sqrt()  # 0 instead of NaN and infinity
    return (roots + 0.5).floor().copysign(x).to(torch.int8), scale


def _of_elements(scale: Tensor, like: Tensor) -> Tensor:
    return scale.repeat_interleave(BLOCK, -1)[..., : like.size(-1)]
