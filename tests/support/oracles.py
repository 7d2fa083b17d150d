"""What the compiled operations and the symmetric product should compute, written plainly; sums are in float64."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def momentum_pack(momentum: Tensor, gradient: Tensor, beta: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """Return the new momentum and the packed update of matrices (m, n), in float64."""
    momentum, gradient = momentum.double(), gradient.double()
    momentum = beta * momentum + (1 - beta) * gradient
    return momentum, beta * momentum + (1 - beta) * gradient if nesterov else momentum


def in_blocks(x: Tensor) -> Tensor:
    """Return a matrix (m, n) in blocks (m, ceil(n / 64), 64), the last of each row filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.size(1) % 64)).unflatten(1, (-1, 64))


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """Return what momentum in 8 bits (m, n) with scales (m, ceil(n / 64)) stands for, in float64."""
    codes = codes.double()
    scale = scale.double().repeat_interleave(64, 1)[:, : codes.size(1)]
    return scale * codes * codes.abs()


def quantization_error(x: Tensor) -> Tensor:
    """Return what storing float64 momentum (m, n) in 8 bits may change, with a root within 5e-6 of itself.

    A code is within d = 1/2 + 7e-4 of r = sqrt(|x| / scale), which is at most 127: 127 * 5.1e-6, and 4e-6 where 1/2 is
    added. So |x| and scale code^2 differ by scale |r - code| (r + code) <= scale d (2 r + d). Scale and value are
    rounded to float32 besides.
    """
    scale = (in_blocks(x).abs().amax(2) / 127**2).clamp_min(2.0**-126)
    scale = scale.repeat_interleave(64, 1)[:, : x.size(1)]
    return scale * 0.5007 * (2 * (x.abs() / scale).sqrt() + 0.5007) + 2.0**-22 * x.abs()


def descend(
    parameter: Tensor, update: Tensor, lr: float, weight_decay: float, multiplier: float, decay_mode: int = 0
) -> Tensor:
    """Return the new parameter (m, n), in float64."""
    parameter, update = parameter.double(), update.double()
    decay = weight_decay if decay_mode == 1 else lr * weight_decay
    kept = parameter * (1 - decay)
    if decay_mode == 2:
        kept = torch.where(parameter.sign() == update.sign(), kept, parameter)
    return kept - lr * multiplier * update


def move_blocks(matrices: Tensor, buffer: Tensor, blocks: Iterable, to_buffer: bool) -> None:
    """Copy blocks, each a `plan.blocks.Block`, between matrices (B, m, n) and a buffer, by the strides of both."""
    for block in blocks:
        size, strides = (block.count, block.rows, block.cols), matrices.stride()
        first = block.position * strides[0] + block.top * strides[1] + block.left * strides[2]
        inside = matrices.as_strided(size, strides, matrices.storage_offset() + first)
        part = buffer.as_strided(size, (block.step, block.row_step, 1), buffer.storage_offset() + block.offset)
        target, source = (part, inside) if to_buffer else (inside, part)
        target.copy_(source)


def normalize(X: Tensor, eps: float, scale: float) -> tuple[Tensor, Tensor]:
    """Return the Frobenius norms (B) of X (B, m, n), and scale X / max(norm, eps), in float64."""
    norms = X.double().square().sum((-2, -1)).sqrt()
    return norms, scale * X.double() / norms.clamp_min(eps).view(-1, 1, 1)


def balance(updates: Tensor, moments: Tensor, beta: float, side: str) -> tuple[Tensor, Tensor]:
    """Return NorMuon's updates (..., m, n) and second moments of `rows` or `columns`, in float64.

    Source: arXiv:2510.05491, algorithm 1, with eps 1e-8; each matrix keeps its norm, as in dion.
    """
    updates, moments = updates.double(), moments.double()
    moments = beta * moments + (1 - beta) * updates.square().mean(-1 if side == "rows" else -2, keepdim=True)
    balanced = updates / (moments.sqrt() + 1e-8)
    before, after = (torch.linalg.matrix_norm(each, keepdim=True) for each in (updates, balanced))
    return balanced * (before / after), moments


def rounding_error(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the spacing of `dtype` around `exact`: what rounding to nearest may change."""
    limits = torch.finfo(dtype)
    return limits.eps / 2 * exact.abs().clamp_min(limits.smallest_normal)


def unit_roundoff(*dtypes: torch.dtype) -> float:
    """Return the relative error of one operation where tensors of `dtypes` meet: in float64 if one is, else float32."""
    return torch.finfo(torch.float64 if torch.float64 in dtypes else torch.float32).eps / 2
