"""`descend_`: applies weight decay and updates to parameters, in place.

    p = row_scale (p keep - lr multiplier u)
    norms = |u|_F                     of each matrix
    keep = 1 - lr weight_decay        decay_mode 0, decoupled
           1 - weight_decay           1, independent
           1 - lr weight_decay        2, cautious: where p and u have one sign, else 1

- `parameter` is a list of B matrices of any strides. `update` is like `packed` of `momentum_pack_`; `offsets`,
  `active`, `found_inf` and the dtype of the arithmetic are as there. A matrix that is not `active` keeps its bits.
- `lr`, `weight_decay` and `multiplier` (1 or B elements, contiguous) are float32 or float64, on the CPU or on the
  matrices' device.
- `row_scale`, on the matrices' device, is float32, contiguous, and has one entry per row: the rows of the first matrix,
  then those of the second, and so on.
- `seeds` (B, int64, contiguous, on either device) makes rounding stochastic, without bias. Parameters are then float16
  or bfloat16. The random bits follow from the seed and from an element's index in the whole matrix, so a shard is
  rounded as it would be in the whole matrix. For that, `origins` has (first_row, first_col, row_length) of each shard,
  3 B numbers. Without `seeds` it is not used.
- `remainder` is B int16 matrices. Together with bfloat16 parameters they are the two halves of float32 numbers, as in
  `kernels/master_weights.py`. Both are written, and together have the bits that float32 parameters would have: the
  result is rounded to float32 once. Cannot be combined with `seeds`.
- `norms` are those of `update`, written as `momentum_pack_` writes its norms, even if a parameter does not change.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..formats import HALF_DTYPES, exact_dtype
from ..master_weights import halves_of, joined
from .arithmetic import computing_dtype, have_one_sign, number, random_bits, round_stochastically
from .memory import Memory
from .norms import check_norms_of, norms_of_wide_
from .pieces import Gate, Piece, of_piece, on_device, parts_of, pieces, stacked, write_
from .refusals import (
    check_buffer,
    check_gate,
    check_matrices,
    check_numbers,
    check_shape,
    check_values,
    dtype_of,
    name_of,
    place,
    shown,
)

SCHEMA = (
    "(Tensor(a!)[] parameter, Tensor update, Tensor lr, Tensor weight_decay, Tensor multiplier, int decay_mode=0, *, "
    "int[]? offsets=None, Tensor? row_scale=None, Tensor? seeds=None, int[]? origins=None, Tensor? active=None, "
    "Tensor? found_inf=None, Tensor(b!)[]? remainder=None, Tensor(c!)? norms=None) -> ()"
)

INDEPENDENT, CAUTIOUS = 1, 2
_MOST = 2**63 - 1  # elements of a whole matrix


class _Descent(NamedTuple):
    """What decay leaves of parameters, and the steps along updates, one for all matrices or one for each."""

    keep: Tensor
    step: Tensor
    cautious: bool

    def of(self, p: Tensor, u: Tensor, piece: Piece) -> Tensor:
        """Return the new parameters (k, rows, cols)."""
        keep = of_piece(self.keep, piece)
        if self.cautious:
            keep = torch.where(have_one_sign(p, u), keep, number(1.0, p))
        return p * keep - u * of_piece(self.step, piece)


class _Draws(NamedTuple):
    """Random bits for stochastic rounding: seeds (B), and where each matrix lies in its whole."""

    seeds: Tensor
    places: Sequence[tuple[int, int]]  # index of the first element, length of a row

    def of(self, piece: Piece, like: Tensor) -> Tensor:
        """Return random bits for the elements (k, rows, cols) of a piece."""
        firsts, lengths = zip(*(self.places[rows.index] for rows in piece))
        firsts = [first + rows.start * length for first, rows, length in zip(firsts, piece, lengths)]
        first, length = (on_device(torch.tensor(x), like.device, torch.int64).view(-1, 1, 1) for x in (firsts, lengths))
        row, col = (torch.arange(size, device=like.device) for size in like.shape[1:])
        return random_bits(of_piece(self.seeds, piece), first + row.view(-1, 1) * length + col)


def descend_(
    parameter: Sequence[Tensor],
    update: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    multiplier: Tensor,
    decay_mode: int = 0,
    *,
    offsets: Optional[Sequence[int]] = None,
    row_scale: Optional[Tensor] = None,
    seeds: Optional[Tensor] = None,
    origins: Optional[Sequence[int]] = None,
    active: Optional[Tensor] = None,
    found_inf: Optional[Tensor] = None,
    remainder: Optional[Sequence[Tensor]] = None,
    norms: Optional[Tensor] = None,
) -> None:
    """Apply weight decay and the scaled update to each parameter, in place; write the updates' norms into `norms`."""
    numbers = {"lr": lr, "weight_decay": weight_decay, "multiplier": multiplier}
    beside = {"seeds": seeds, "active": active, "row_scale": row_scale, "found_inf": found_inf}
    check_matrices("parameter", parameter, update)
    check_buffer("update", update, parameter, offsets)
    check_norms_of("update", update, offsets, norms)
    _check_options(parameter, decay_mode, seeds, remainder)
    _check_memory(parameter, remainder, norms, {"update": update, **numbers, **beside})
    for name, t in numbers.items():
        check_numbers(name, t, len(parameter), update)
    _check_row_scale(row_scale, parameter, update)
    check_values("seeds", seeds, torch.int64, len(parameter), update)
    check_gate(active, found_inf, len(parameter), update)
    places, device = _places(parameter, origins), update.device
    dtype = computing_dtype(dtype_of(parameter), update.dtype)
    draws = None if seeds is None else _Draws(on_device(seeds.reshape(-1), device, torch.int64), places)
    descent, gate = _descent(numbers, decay_mode, device, dtype), Gate.on(device, active, found_inf)
    parts, scales = parts_of(update, parameter, offsets), _scales(row_scale, parameter)
    for piece in pieces(parameter):
        p = stacked(parameter, piece)
        p = (p if remainder is None else joined(p, stacked(remainder, piece))).to(dtype)
        result = descent.of(p, stacked(parts, piece).to(dtype), piece)
        result = result if scales is None else result * stacked(scales, piece).to(dtype)
        result = result if draws is None else round_stochastically(result, draws.of(piece, p), parameter[0].dtype)
        _write_(parameter, remainder, piece, result, gate.is_open(piece))
    if norms is not None:
        norms_of_wide_(norms, update)


def _write_(
    parameter: Sequence[Tensor],
    remainder: Optional[Sequence[Tensor]],
    piece: Piece,
    result: Tensor,
    is_open: Optional[Tensor],
) -> None:
    if remainder is not None:
        result, lower = halves_of(result.float())
        write_(remainder, piece, lower, is_open)
    write_(parameter, piece, result, is_open)


def _descent(numbers: dict[str, Tensor], mode: int, device: torch.device, dtype: torch.dtype) -> _Descent:
    """Return keep and step, computed in `exact_dtype` where the numbers are, and rounded to `dtype`."""
    at = torch.device("cpu") if all(t.is_cpu for t in numbers.values()) else device
    lr, weight_decay, multiplier = (on_device(t.reshape(-1), at, exact_dtype(at)) for t in numbers.values())
    keep = 1 - (weight_decay if mode == INDEPENDENT else lr * weight_decay)
    keep, step = (on_device(t.to(dtype), device, dtype) for t in (keep, lr * multiplier))
    return _Descent(keep, step, mode == CAUTIOUS)


def _scales(row_scale: Optional[Tensor], parameter: Sequence[Tensor]) -> Optional[list[Tensor]]:
    """Return the factors of each matrix's rows (rows, 1)."""
    if row_scale is None:
        return None
    return [scale.view(-1, 1) for scale in row_scale.reshape(-1).split([len(p) for p in parameter])]


def _places(parameter: Sequence[Tensor], origins: Optional[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the index of each matrix's first element in its whole, and how long the whole's rows are."""
    if origins is None:
        return [(0, p.size(1)) for p in parameter]
    if len(origins) != 3 * len(parameter):
        raise RuntimeError(f"origins must be 3 per matrix, {3 * len(parameter)}, got {len(origins)}")
    places = []
    for i, p in enumerate(parameter):
        (rows, cols), (row, col, length) = p.shape, origins[3 * i : 3 * i + 3]
        if row < 0 or col < 0 or col + cols > length or (row + rows) * length > _MOST:
            raise RuntimeError(
                f"origins of matrix {i} must be (first_row, first_col, row_length) of a whole around its "
                f"{rows} x {cols} elements, got {shown((row, col, length))}"
            )
        places.append((row * length + col, length))
    return places


def _check_options(
    parameter: Sequence[Tensor], decay_mode: int, seeds: Optional[Tensor], remainder: Optional[Sequence[Tensor]]
) -> None:
    if decay_mode not in (0, INDEPENDENT, CAUTIOUS):
        raise RuntimeError(f"decay_mode must be 0 (decoupled), 1 (independent) or 2 (cautious), got {decay_mode}")
    if seeds is not None and parameter and parameter[0].dtype not in HALF_DTYPES:
        raise RuntimeError(
            "seeds ask for stochastic rounding, which is for float16 and bfloat16 parameters, "
            f"got {name_of(parameter[0].dtype)}"
        )
    if remainder is None:
        return
    if seeds is not None:
        raise RuntimeError("seeds round stochastically, and with a remainder nothing is left to round")
    if len(remainder) != len(parameter):
        raise RuntimeError(f"remainder must be one per matrix, {len(parameter)}, got {len(remainder)}")
    for i, (p, r) in enumerate(zip(parameter, remainder)):
        _check_remainder(p, r, i)


def _check_remainder(p: Tensor, r: Tensor, i: int) -> None:
    if p.dtype != torch.bfloat16:
        raise RuntimeError(
            f"a remainder is what bfloat16 parameters lack of float32, got parameters of {name_of(p.dtype)}"
        )
    if r.dtype != torch.int16:
        raise RuntimeError(f"remainder must be Short, got {name_of(r.dtype)} at {i}")
    check_shape(f"remainder[{i}]", r, p, "its parameter")
    if r.device != p.device:
        raise RuntimeError(f"remainder must be on {place(p)} like the parameters, got {place(r)}")


def _check_memory(
    parameter: Sequence[Tensor],
    remainder: Optional[Sequence[Tensor]],
    norms: Optional[Tensor],
    inputs: dict[str, Optional[Tensor]],
) -> None:
    memory = Memory()
    for i, (p, r) in enumerate(itertools.zip_longest(parameter, remainder or ())):
        memory.write("parameter", p, i)
        if r is not None:
            memory.write("remainder", r, i)
    for name, t in inputs.items():
        memory.read(name, t)
    if norms is not None:
        memory.write("norms", norms)
    memory.check()


def _check_row_scale(row_scale: Optional[Tensor], parameter: Sequence[Tensor], update: Tensor) -> None:
    check_values("row_scale", row_scale, torch.float32, sum(len(p) for p in parameter), update)
    if row_scale is not None and row_scale.device != update.device:
        raise RuntimeError(f"row_scale must be on {place(update)}, got {place(row_scale)}")
