"""The symmetric product C = alpha A B + beta D + diagonal I, compiled for GPUs of compute capability 9.0.

    A  (b, m, k)  float16 or bfloat16, with contiguous rows; or contiguous columns if B has contiguous rows, as for A.mT
    B  (b, k, m)  like A, contiguous rows or columns: A.mT, or any operand with which the result is symmetric
    D  (b, m, m)  like A, symmetric (not checked), or None
    C  (b, m, m)  like A, overlapping none of them; bit for bit symmetric

It computes what `symmetric_gemm.py` computes with Triton, by CUTLASS's main loop for these GPUs. Two multiprocessors
work together on a square of 256 x 256; each loads half of the data that both need. With t = ceil(m / 256), each of the
t (t + 1) / 2 squares on and below the diagonal is computed once and also stored mirrored. Sums run in float32 in one
order, from k = 0 up, and are rounded once: a matrix gets the same bits alone and in a batch.

One pair computes a square from beginning to end. If there are few squares, some pairs stay idle: a matrix of 3072 rows
has 78 squares, which 66 pairs compute in two rounds, and in the second one 12 pairs work. With more than one of
`sections`, these last 12 squares are cut along k into that many. Different pairs sum the sections of a square and keep
the sums in float32. Whichever pair comes last adds them up, in their order. Which squares are cut depends on m alone
(`cuts`). So for one number of sections a matrix has the same bits in every batch. During the call a section takes 256
KiB of memory; a batch that needs more than 64 MiB is computed in several launches.

Addresses are multiples of 16 bytes, as are all strides except the inner one, which is 1; m is a multiple of 8. Operands
that do not fit, and other GPUs, raise RuntimeError before anything is written.

It is chosen only by `warmup` or the lab, which prove and time it on the GPU they find.
"""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from .. import native
from ..capabilities import architectures
from ..formats import HALF_DTYPES
from ..operands import fits_descriptor
from ..speeds.predictions import SQUARE, triangle
from ..tracing import constant_while_traced

ARCHITECTURE = "9.0a"
# The rows of the result are a multiple of it.
ROWS = 8
# How many pairs of multiprocessors an H100 has.
PAIRS = 66


def hopper_product(
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Optional[Tensor] = None,
    diagonal: float = 0.0,
    sections: int = 1,
) -> Tensor:
    """Return alpha A B + beta D + diagonal I (b, m, m), symmetric; written to `out` if that is given.

    The squares that would leave multiprocessors idle are summed in `sections` sections, at most 8. No gradient flows.
    Raises RuntimeError if operands do not fit, and NotImplementedError on CPUs.
    """
    C = A.new_empty(A.size(0), A.size(1), A.size(1)) if out is None else out
    native.hopper_gemm_(C, A, B, D, alpha, beta, diagonal, sections)
    return C


def fits(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor) -> bool:
    """Whether `hopper_product` takes operands of these dtypes and layouts. Their shapes are known to match."""
    sized = A.dtype in HALF_DTYPES and A.size(1) % ROWS == 0
    ordered = A.stride(2) == 1 or B.stride(2) == 1
    return sized and ordered and all(map(fits_descriptor, (A, B, C))) and (D is None or fits_descriptor(D))


def cuts(m: int) -> bool:
    """Whether sections change anything for m rows: some squares are left after whole rounds of all pairs."""
    return triangle(m, SQUARE) % PAIRS > 0


@constant_while_traced
def is_built() -> bool:
    """Whether this build has the product. Where the builder has named no architectures, GPUs decide."""
    return not native.IS_PORTABLE and ARCHITECTURE in (architectures() or [ARCHITECTURE])
