"""The symmetric product C = alpha A B + beta D + diagonal I, compiled for GPUs of compute capability 9.0.

    A  (b, m, k)  float16 or bfloat16, rows as runs of memory, or columns where B has rows, as A.mT then has
    B  (b, k, m)  like A, rows or columns as runs: A.mT, or any operand with which the result is symmetric
    D  (b, m, m)  like A, symmetric (not checked), or None
    C  (b, m, m)  like A, overlapping none of them; bit for bit symmetric

What `symmetric_gemm.py` computes by Triton, by CUTLASS's main loop for these GPUs: two multiprocessors together work on
a square of 256, for which each loads half of what both need. Of t (t + 1) / 2 squares, t = ceil(m / 256), each is
computed once, and stored mirrored as well. Sums run in float32 in one order, from k = 0 up, and are rounded once: a
matrix gets the same bits alone and in a batch. A square is the work of one pair from its beginning to its end, so that
few squares leave multiprocessors idle.

Addresses are multiples of 16 bytes, as are all strides but the inner one, which is 1; m is a multiple of 8. What does
not fit raises RuntimeError before anything is written, as does another GPU.

It was written where there was no GPU: it is never chosen but by `warmup` or the lab, which prove it and time it on the
GPU that is there.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from . import native

CAPABILITY = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)
# What bytes of addresses and strides, and rows of the result, are multiples of.
BYTES, ROWS = 16, 8


def hopper_product(
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Optional[Tensor] = None,
    diagonal: float = 0.0,
) -> Tensor:
    """Return alpha A B + beta D + diagonal I (b, m, m), symmetric; written to `out` if that is given.

    Without gradient. Raises RuntimeError where operands do not fit, and NotImplementedError on CPUs.
    """
    C = A.new_empty(A.size(0), A.size(1), A.size(1)) if out is None else out
    native.hopper_gemm_(C, A, B, D, alpha, beta, diagonal)
    return C


def fits(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor) -> bool:
    """Whether `hopper_product` takes operands of these dtypes that lie like these; their shapes are known to fit."""
    sized = A.dtype in DTYPES and A.size(1) % ROWS == 0 and A.numel() > 0
    ordered = A.stride(2) == 1 or B.stride(2) == 1
    return sized and ordered and all(_lies_well(x) for x in (A, B, C)) and (D is None or _lies_well(D))


def runs_on(device: torch.device) -> bool:
    """Whether a device is a GPU that it is compiled for."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) == CAPABILITY


def _lies_well(x: Tensor) -> bool:
    inner = 2 if x.stride(2) == 1 or x.size(2) == 1 else 1
    outer = [x.stride(dim) for dim in (0, 3 - inner) if x.size(dim) > 1]
    in_runs = x.stride(inner) == 1 or x.size(inner) == 1
    return in_runs and x.data_ptr() % BYTES == 0 and all(n > 0 and n * x.element_size() % BYTES == 0 for n in outer)
