"""The products of an iteration on a CPU by the compiled `gemm_`, and all of an iteration in one call."""

from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import Tensor

from .formats import torch_is_slow
from .native import IS_PORTABLE, gemm_, gemm_instructions, gram_newton_schulz_, newton_schulz_
from .speeds.machine import is_made_by_intel

# The instructions with which `gemm_` multiplies on this processor.
INSTRUCTIONS = {dtype: gemm_instructions(dtype) for dtype in (torch.float32, torch.bfloat16)}

# Those that have been measured to be faster than torch's products.
_FASTER = ("avx2", "avx512", "avx512_bf16", "amx")

# The compiled product is faster even in plain C++ where torch multiplies bfloat16 number by number. Measured with AVX2.
_PLAIN_CODE_IS_FASTER = (
    not IS_PORTABLE and torch.backends.cpu.get_cpu_capability() == "AVX2" and torch_is_slow(torch.bfloat16)
)


def is_faster(dtype: torch.dtype) -> bool:
    """Whether `gemm_` was faster than torch's products of this dtype where a processor like this one was measured."""
    return INSTRUCTIONS.get(dtype) in _FASTER or (dtype == torch.bfloat16 and _PLAIN_CODE_IS_FASTER)


def bfloat16_is_faster() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32.

    With AMX it does. With AVX512_BF16 alone AMD's cores do, and Intel's are slower in bfloat16: measured on Zen 4 and
    on Emerald Rapids (docs/performance.md). `INSTRUCTIONS` has no AMX if the operating system denies it to the process.
    """
    has_amx = INSTRUCTIONS[torch.bfloat16] == "amx" or (IS_PORTABLE and torch.cpu._is_amx_tile_supported())
    return has_amx or (torch.cpu._is_avx512_bf16_supported() and not is_made_by_intel())


def symmetric(
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Optional[Tensor] = None,
) -> Tensor:
    """Return alpha A B + beta D (b, m, m), symmetric; written to `out` if that is given, also in float32."""
    C = A.new_empty(A.size(0), A.size(1), B.size(2)) if out is None else out
    gemm_(C, A, B, D, alpha, beta, True, INSTRUCTIONS[A.dtype])
    return C


def affine(B: Tensor, X: Tensor, a: float, out: Optional[Tensor] = None) -> Tensor:
    """Return a X + B X (b, m, n), written to `out`, or to X if there is none: less has to fit into the cache then."""
    out = X if out is None else out
    gemm_(out, B, X, X if a else None, 1.0, a, False, INSTRUCTIONS[X.dtype])
    return out


def newton_schulz(X: Tensor, schedule: Sequence, squares: Optional[tuple[Tensor, Tensor]] = None) -> Tensor:
    """Replace X (b, m, n) by all steps of the standard iteration, and return it; `squares` is room for its products."""
    b, m, n = X.shape
    A, B = squares or (X.new_empty(b, m, m), X.new_empty(b, m, m))
    coefficients = [number for step in schedule for number in step]
    newton_schulz_(X, A, B, coefficients, fits_a_core(m, n, X.element_size()), INSTRUCTIONS[X.dtype])
    return X


def gram_newton_schulz(X: Tensor, windows: Sequence[Sequence], squares: Optional[Sequence[Tensor]] = None) -> Tensor:
    """Replace X (b, m, n) by all steps of the Gram iteration with float32 squares, and return it.

    `squares` is room for four of them, (b, m, m) each.
    """
    b, m, n = X.shape
    R, H, Q, T = squares or (X.new_empty(b, m, m, dtype=torch.float32) for _ in range(4))
    coefficients = [number for window in windows for step in window for number in step]
    alone = fits_a_core(m, n, torch.float32.itemsize)
    names = INSTRUCTIONS[X.dtype], INSTRUCTIONS[torch.float32]
    gram_newton_schulz_(X, R, H, Q, T, coefficients, list(map(len, windows)), alone, *names)
    return X


def fits_a_core(m: int, n: int, itemsize: int) -> bool:
    """Whether one core of a CPU should work alone on m x n matrices: an iteration's tensors take up to 8 MiB.

    The bound comes from timing both ways in bfloat16 on two cores with AMX, and again on two with AVX512_BF16: larger
    matrices are faster if all cores share them.
    """
    return itemsize * (2 * m * n + 2 * m * m) <= 2**23
