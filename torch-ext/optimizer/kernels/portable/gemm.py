"""`gemm_`: a product of matrices on a CPU, C = alpha A B + beta D, without beta D where D is None.

A (b, m, k), B (b, k, n), D and C (b, m, n) are all float32 or all bfloat16. C and D may also both be float32 where A
and B are bfloat16. C and D have contiguous rows, A and B contiguous rows or columns. A, B and D may share memory. C
must not share memory with them, with one exception: without `symmetric`, C may be B itself, which the result replaces,
and then D may be that tensor, too.

- `alpha` and `beta` are rounded to float32. Sums are in float32, in an order that follows from k alone. They are
  multiplied by alpha, and beta D is added, in float32, too, without being rounded before; the result is rounded once to
  the dtype of C. A matrix gets the same bits alone and in any batch, with any number of threads. Different
  `instructions` may round differently, and "portable" sums of float32 differ between x86-64 and ARM. With "amx" and
  "avx512_bf16" numbers below 2^-126 in A and B, and sums below it, are zero.
- `symmetric` says that the results are symmetric (m = n; D too). Only blocks on and below the diagonal are computed,
  and are also stored mirrored, so C is symmetric to the bit.
- `instructions` are "amx", "avx512_bf16" or "portable" for bfloat16, and "avx512", "avx2" or "portable" for float32;
  `gemm_instructions` returns the best ones here. Only those fit that this processor and system have. The AMX
  configuration of each thread is restored.

The function here takes only "portable", does not round `alpha` and `beta`, and sums in float64, where products are
exact, in torch's order. The compiled one rounds all of these to float32: by so much they differ. `gemm_instructions`
names no instructions of the processor, so torch's products are preferred (`kernels/products.py`), and this one runs
only for those who ask for it.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .arithmetic import narrowed
from .memory import Memory, is_same
from .refusals import name_of, place, shown

SCHEMA = (
    "(Tensor(a!) C, Tensor A, Tensor B, Tensor? D, float alpha, float beta, bool symmetric, str instructions) -> ()"
)
INSTRUCTIONS_SCHEMA = "(str dtype) -> str"

INSTRUCTIONS = "portable"


def gemm_instructions(dtype: str) -> str:
    """Return the only instructions that `gemm_` takes, for matrices of a dtype, "float32" or "bfloat16"."""
    if dtype not in ("float32", "bfloat16"):
        raise RuntimeError(f"dtype must be float32 or bfloat16, got {dtype}")
    return INSTRUCTIONS


def gemm_(
    C: Tensor,
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor],
    alpha: float,
    beta: float,
    symmetric: bool,
    instructions: str,
) -> None:
    """Write alpha A B + beta D to C, one matrix at a time."""
    _check_operands(C, A, B, D, symmetric)
    _check_memory(C, A, B, D, symmetric)
    check_instructions(instructions)
    for i, c in enumerate(C):
        product = alpha * (A[i].double() @ B[i].double())
        product = product if D is None else product + beta * D[i].double()
        result = narrowed(product, C.dtype)
        c.copy_(torch.where(_is_upper(c), result.mT, result) if symmetric else result)


def check_instructions(name: str) -> None:
    """Raise RuntimeError unless `name` is INSTRUCTIONS."""
    if name != INSTRUCTIONS:
        raise RuntimeError(f"instructions must be one of those that this variant has, {INSTRUCTIONS}; got {name}")


def _is_upper(c: Tensor) -> Tensor:
    row, col = (torch.arange(size, device=c.device) for size in c.shape)
    return row.view(-1, 1) < col


def _check_operands(C: Tensor, A: Tensor, B: Tensor, D: Optional[Tensor], symmetric: bool) -> None:
    if A.ndim != 3 or B.ndim != 3:
        shapes = f"{shown(A.shape)} and {shown(B.shape)}"
        raise RuntimeError(f"A and B must be (batch, m, k) and (batch, k, n), got {shapes}")
    count, m, k, n = *A.shape, B.size(2)
    if A.dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError(f"A must be float32 or bfloat16, got {name_of(A.dtype)}")
    check_batch("A", A, (count, m, k), A.dtype)
    check_batch("B", B, (count, k, n), A.dtype)
    has_choice = A.dtype == torch.bfloat16
    of_result = torch.float32 if has_choice and C.dtype == torch.float32 else A.dtype
    check_batch("C", C, (count, m, n), of_result, "as A is, or float32" if has_choice else "as A is")
    check_rows("C", C)
    if symmetric and m != n:
        raise RuntimeError(f"a symmetric result must be square, got {shown(C.shape)}")
    for name, t in ("A", A), ("B", B):
        if not _has_runs(t, 1) and not _has_runs(t, 2):
            strides = shown(t.stride())
            raise RuntimeError(f"{name} must have a stride of 1 along rows or columns, got strides {strides}")
    if D is not None:
        check_batch("D", D, (count, m, n), of_result, "as C is")
        check_rows("D", D)


def check_batch(name: str, t: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, like: str = "as A is") -> None:
    """Raise RuntimeError unless `t` is on the CPU and of this shape and dtype; `like` says why of this dtype."""
    if not t.is_cpu:
        raise RuntimeError(f"{name} must be on the CPU, got {place(t)}")
    if t.dtype != dtype:
        raise RuntimeError(f"{name} must be {name_of(dtype)} {like}, got {name_of(t.dtype)}")
    if t.shape != shape:
        raise RuntimeError(f"{name} must be {shown(shape)}, got {shown(t.shape)}")


def check_rows(name: str, t: Tensor) -> None:
    """Raise RuntimeError unless the rows of `t` are runs of memory."""
    if not _has_runs(t, 2):
        raise RuntimeError(f"{name} must have a stride of 1 along rows, got strides {shown(t.stride())}")


def _has_runs(t: Tensor, dim: int) -> bool:
    return t.stride(dim) == 1 or t.size(dim) <= 1


def _check_memory(C: Tensor, A: Tensor, B: Tensor, D: Optional[Tensor], symmetric: bool) -> None:
    in_place = not symmetric and is_same(C, B)
    memory = Memory()
    memory.write("C", C)
    memory.read("A", A)
    memory.read("B", None if in_place else B)
    memory.read("D", None if D is None or (in_place and is_same(C, D)) else D)
    memory.check()
