"""What the operations ask of their arguments. The compiled ones ask the same: `optimizer_common/arguments.h`.

Each `check_` function raises RuntimeError, with the compiled operations' words, if an argument does not fit.
"""

from __future__ import annotations

from typing import Iterable, Optional, Sequence

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# The names by which torch's C++ interface calls dtypes, and so the compiled operations' messages.
_NAMES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.bool: "Bool",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
}


def name_of(dtype: torch.dtype) -> str:
    """Return what messages call a dtype."""
    return _NAMES.get(dtype, str(dtype))


def shown(numbers: Iterable[int]) -> str:
    """Return numbers, such as sizes, as messages show them."""
    return f"({', '.join(map(str, numbers))})"


def place(t: Tensor) -> str:
    """Return where a tensor is, as messages say it."""
    return "the CPU" if t.is_cpu else f"device {t.device.index or 0}"


def dtype_of(matrices: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of a list; an empty one is taken to be float32."""
    return matrices[0].dtype if matrices else torch.float32


def check_device(name: str, t: Tensor, like: Tensor) -> None:
    """Refuse a tensor that is on another device than `like`."""
    if t.device != like.device:
        raise RuntimeError(f"{name} must be on {place(like)} like the other tensors, got {place(t)}")


def check_like(name: str, t: Tensor, like: Tensor) -> None:
    """Refuse a tensor that is not floating, or on another device than `like`."""
    check_device(name, t, like)
    if t.dtype not in FLOATING:
        raise RuntimeError(f"{name} must be float32, float64, float16 or bfloat16, got {name_of(t.dtype)}")


def check_matrix(name: str, t: Tensor, i: int) -> None:
    """Refuse a tensor of a list that is not a matrix."""
    if t.ndim != 2:
        raise RuntimeError(f"{name}[{i}] must be a matrix, got shape {shown(t.shape)}")


def check_matrices(name: str, matrices: Sequence[Tensor], buffer: Tensor) -> None:
    """Refuse a list that is not of matrices of one floating dtype on the device of the buffer."""
    for i, t in enumerate(matrices):
        check_matrix(name, t, i)
        check_like(name, t, buffer)
        if t.dtype != matrices[0].dtype:
            dtypes = f"{name_of(matrices[0].dtype)} and {name_of(t.dtype)} at {i}"
            raise RuntimeError(f"{name} must have one dtype, got {dtypes}")


def check_shape(name: str, t: Tensor, like: Tensor, of: str) -> None:
    """Refuse a tensor without the shape of `like`, which is `of` something."""
    if t.shape != like.shape:
        raise RuntimeError(f"{name} must have the shape {shown(like.shape)} of {of}, got {shown(t.shape)}")


def check_buffer(name: str, buffer: Tensor, matrices: Sequence[Tensor], offsets: Optional[Sequence[int]]) -> None:
    """Refuse a buffer that is not a batch for these matrices, or flat memory with room for each at its offset."""
    check_like(name, buffer, buffer)
    if offsets is not None:
        _check_offsets(name, buffer, matrices, offsets)
        return
    if buffer.ndim != 3 or len(buffer) != len(matrices):
        raise RuntimeError(f"{name} must be ({len(matrices)}, rows, cols), got {shown(buffer.shape)}")
    for i, t in enumerate(matrices):
        if t.shape != buffer.shape[1:]:
            raise RuntimeError(
                f"{name} of shape {shown(buffer.shape)} needs matrices of its last two sizes, "
                f"got {shown(t.shape)} at {i}"
            )


def _check_offsets(name: str, buffer: Tensor, matrices: Sequence[Tensor], offsets: Sequence[int]) -> None:
    if buffer.ndim != 1 or not buffer.is_contiguous():
        shape = shown(buffer.shape)
        raise RuntimeError(f"{name} must be contiguous and 1-D where offsets are given, got shape {shape}")
    if len(offsets) != len(matrices):
        raise RuntimeError(f"offsets must be one per matrix, {len(matrices)}, got {len(offsets)}")
    room = buffer.numel()
    for i, (t, offset) in enumerate(zip(matrices, offsets)):
        if not 0 <= offset <= room - t.numel():
            raise RuntimeError(f"offsets[{i}] = {offset} puts {t.numel()} elements outside of {name}, which has {room}")
    parts = sorted((offset, offset + t.numel()) for t, offset in zip(matrices, offsets) if t.numel())
    for (begin, end), (start, _) in zip(parts, parts[1:]):
        if start < end:
            raise RuntimeError(f"offsets overlap: elements {begin} to {end} and a matrix from {start}")


def check_values(name: str, t: Optional[Tensor], dtype: torch.dtype, count: int, buffer: Tensor) -> None:
    """Refuse values that are not `count` of this dtype, contiguous, on the CPU or the buffer's device."""
    if t is None:
        return
    if t.dtype != dtype:
        raise RuntimeError(f"{name} must be {name_of(dtype)}, got {name_of(t.dtype)}")
    if t.numel() != count or not t.is_contiguous():
        raise RuntimeError(f"{name} must have {count} elements, contiguous, got shape {shown(t.shape)}")
    if not t.is_cpu and t.device != buffer.device:
        raise RuntimeError(f"{name} must be on the CPU or on {place(buffer)}, got {place(t)}")


def check_numbers(name: str, t: Tensor, count: int, buffer: Tensor) -> None:
    """Refuse numbers that are not 1 or `count` in float32 or float64."""
    if t.numel() not in (1, count):
        raise RuntimeError(f"{name} must have 1 or {count} elements, got shape {shown(t.shape)}")
    dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
    check_values(name, t, dtype, t.numel(), buffer)


def check_gate(active: Optional[Tensor], found_inf: Optional[Tensor], count: int, buffer: Tensor) -> None:
    """Refuse gates that are not a bool for each matrix, and one float32 number."""
    check_values("active", active, torch.bool, count, buffer)
    check_values("found_inf", found_inf, torch.float32, 1, buffer)
