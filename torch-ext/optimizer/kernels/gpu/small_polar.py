"""The whole orthogonalization of matrices with a short side of at most 128: one launch, one program per matrix.

    G  (b, m, n)  float16, bfloat16 or float32, m <= 128, any strides; pass a tall matrix as its transposed view
    C  (b, m, n)  of the work dtype or float32, any strides, sharing no storage with G

A window is a run of steps that share one Gram matrix. From X = scale G / max(|G|_F, eps), `square_chains.py` computes
every window (and has the formulas); C is the last Q X. Windows of one step are Newton-Schulz, longer ones are Gram
Newton-Schulz. `scale` must be folded into the coefficients (`with_folded_scale`).

X and the square matrices are rounded to the work dtype once per product. Sums run in float32, from k = 0 up, and
float32 operands are multiplied exactly as they are. C has one rounding. The bits of a matrix do not depend on the batch
or on the grid. They may depend on the strides of G and on whether its address is a multiple of 16 bytes: from these the
compiler decides which thread holds which entries, and so in which order the squares of the norm are added.

Each program has its own part of a scratch buffer, where X is padded with zeros, and the squares, too, if they live
there: no product needs a mask, and all loads are wide.

Sources: Jordan, Muon (2024); Dao-AILab, https://github.com/Dao-AILab/gram-newton-schulz.
"""

from __future__ import annotations

from typing import Optional, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..native import define_operation
from ..operands import TRITON_DTYPES, device_of
from ..portable.memory import extent
from .panels import TINY, applied, normalize, pointers
from .small_steps import check_steps, coefficients_and_ends, steps_of
from .square_chains import applied_on_chip, chain_in_scratch, chain_on_chip
from .tuned import PADDED_SIDES, SmallConfig, chosen_small_config, padded_side, target_of

REGISTERS = 65536  # of an NVIDIA multiprocessor


@triton.jit(do_not_specialize=["ends"])  # a set of bits: no property of the number helps to compile
def _small_polar_kernel(
    G, C, scratch,  # scratch (b, SIDE (3 SIDE + width)) of the work dtype; (b, SIDE width) if ON_CHIP
    coefficients, ends,  # numbers a, b, c of each step; bit i of `ends`: a window ends with step i
    scale, eps,
    m, n, width,  # n, rounded up to a multiple of WIDTH and DEPTH
    G_batch, G_row, G_col,
    C_batch, C_row, C_col,  # strides in elements
    SIDE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, ON_CHIP: tl.constexpr,
):  # fmt: skip
    """One program orthogonalizes one matrix."""
    matrix = tl.program_id(0).to(tl.int64)
    G_row, G_col = tl.cast(G_row, tl.int64), tl.cast(G_col, tl.int64)
    C_row, C_col = tl.cast(C_row, tl.int64), tl.cast(C_col, tl.int64)
    SQUARES: tl.constexpr = 0 if ON_CHIP else 3 * SIDE * SIDE
    scratch += elements_before(matrix, width, SQUARES, SIDE)
    X = scratch + SQUARES, width, 1
    normalize((G + matrix * G_batch, G_row, G_col), X, m, n, width, scale, eps, SIDE, WIDTH)
    if ON_CHIP:
        Q, beta = chain_on_chip(X, coefficients, ends, m, width, SIDE, WIDTH, DEPTH)
    else:
        Q, beta = chain_in_scratch(X, scratch, coefficients, ends, m, width, SIDE, WIDTH, DEPTH)

    rows = tl.arange(0, SIDE)
    C += matrix * C_batch
    for first in range(0, width, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        if ON_CHIP:
            sums = applied_on_chip(Q, X, beta, first, SIDE, WIDTH)
        else:
            sums = applied(Q, X, beta, first, SIDE, WIDTH, DEPTH)
        places = pointers((C, C_row, C_col), rows, columns)
        tl.store(places, sums.to(C.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def elements_before(matrix, width, SQUARES: tl.constexpr, SIDE: tl.constexpr):
    """Return how many elements of scratch lie before those of `matrix`, in int64: for long matrices 2^31 or more."""
    return matrix * (SQUARES + SIDE * tl.cast(width, tl.int64))


def launch_small_polar(G: Tensor, C: Tensor, steps: Sequence[float], scaling: tuple, config: SmallConfig) -> None:
    """Write the polar factors of G into C by one launch with an explicit configuration.

    `scaling` is (scale, eps, work dtype); the other arguments are those of `small_polar_`, unchecked. The launch
    allocates scratch memory for each matrix: X in the work dtype, and three squares unless they stay on the chip.
    """
    batch, m, n = G.shape
    if not G.numel():
        return
    scale, eps, work_dtype = scaling
    side, panel = config.side, max(config.width, config.depth)
    width = triton.cdiv(n, panel) * panel
    squares = 0 if config.on_chip else 3 * side
    scratch = torch.empty(batch * side * (squares + width), dtype=work_dtype, device=G.device)
    coefficients, ends = coefficients_and_ends(steps)
    # Without a limit NVIDIA's assembler spills a few registers to fit more blocks on a multiprocessor. All threads of
    # a block share its registers.
    registers = {} if torch.version.hip else {"maxnreg": min(255, REGISTERS // (32 * config.warps))}
    _small_polar_kernel[(batch,)](
        G, C, scratch, coefficients, ends, scale, eps, m, n, width, *G.stride(), *C.stride(),
        SIDE=side, WIDTH=config.width, DEPTH=config.depth, ON_CHIP=bool(config.on_chip),
        num_warps=config.warps, num_stages=config.stages, **registers,
    )  # fmt: skip


def fits(m: int, n: int, dtype: torch.dtype) -> bool:
    """Whether `small_polar` takes m x n matrices, or their transposes, with this work dtype."""
    short, long = min(m, n), max(m, n)
    return short <= PADDED_SIDES[-1] and dtype in TRITON_DTYPES and long <= _longest(short)


def small_polar(
    G: Tensor,
    windows: Sequence[Sequence[tuple[float, float, float]]],
    scale: float,
    eps: float,
    work_dtype: torch.dtype,
    out: Optional[Tensor] = None,
) -> Tensor:
    """Return the polynomial of each matrix of G (b, m, n), m <= 128, over max(|G|_F, eps), written to `out` if given.

    `windows` holds the steps (a, b, c), with `scale` folded in; each window starts from a newly computed Gram matrix.
    `out` may have the work dtype or float32; without it the result has the work dtype. No gradient flows. Errors:
    `check_operands`.
    """
    steps = steps_of(windows)
    C = torch.empty_like(G, dtype=work_dtype) if out is None else out
    # Fake tensors need the op, which has their fake kernel. For real ones its dispatch costs more than the launch.
    traced = torch.compiler.is_compiling() or type(G) is not Tensor
    (small_polar_ if traced or not G.is_cuda else _on_gpu)(G, C, steps, scale, eps, work_dtype)
    return C


def _on_gpu(G: Tensor, C: Tensor, steps: Sequence[float], scale: float, eps: float, work_dtype: torch.dtype) -> None:
    """Write the polar factors of G into C; `steps` are as `small_steps.py` has them."""
    check_operands(G, C, steps, scale, eps, work_dtype)
    name, target = torch.cuda.get_device_name(G.device), target_of(G.device)
    config = chosen_small_config(name, target, work_dtype, G.shape[1:])
    with torch.cuda.device(G.device):  # Triton launches on the current device, not on that of the arguments
        launch_small_polar(G, C, steps, (scale, eps, work_dtype), config)


def _on_cpu(G, C, steps, scale, eps, work_dtype) -> None:
    """Compute what the kernel computes, with torch's products and one matrix at a time, rounding where it rounds."""
    check_operands(G, C, steps, scale, eps, work_dtype)
    for g, result in zip(G.float(), C):
        if g.numel():
            result.copy_(_polar_factor(_normalized(g, scale, eps), steps, work_dtype))


def _normalized(g: Tensor, scale: float, eps: float) -> Tensor:
    exponent = g.abs().nan_to_num(0.0, torch.inf).max().view(torch.int32) & (255 << 23)
    unit = ((254 << 23) - exponent.clamp(1 << 23, 253 << 23)).view(torch.float32)
    # The kernel adds in a tree. torch adds in a row and needs float64 to be as exact.
    norm = torch.linalg.vector_norm(unit * g, dtype=torch.float64).float()
    least = unit * max(eps, TINY.value)
    return unit * g * (scale / torch.where(norm < least, least, norm))


def _polar_factor(X: Tensor, steps: Sequence[float], work_dtype: torch.dtype) -> Tensor:
    """Return the result in float32, before its last rounding. Values that `rounded` returns are float32, too."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(work_dtype).float()

    opens, Q = True, X
    for i in range(0, len(steps), 4):
        a, b, c, closes = steps[i : i + 4]
        X = rounded(X)
        if opens:
            R = rounded(X @ X.mT)
        alone = opens and closes
        H = c * (R @ R) + b * R
        H = rounded(H if alone else H + a * torch.eye(len(R), dtype=R.dtype, device=R.device))
        Q = H if opens else rounded(H @ Q)
        if closes:
            X = Q @ X + a * X if alone else Q @ X
        else:
            R = rounded(H @ rounded(H @ R))
        opens = closes
    return X


def check_operands(
    G: Tensor, C: Tensor, steps: Sequence[float], scale: float, eps: float, work_dtype: torch.dtype
) -> None:
    """Raise ValueError unless G (b, m, n), m <= 128, and C fit each other and the other arguments make sense.

    G's dtype and the work dtype must be in `TRITON_DTYPES`. C must have the work dtype or float32, share no storage
    with G, and not have two entries at one address.
    """
    if G.ndim != 3 or G.dtype not in TRITON_DTYPES or G.size(1) > PADDED_SIDES[-1]:
        wanted = f"(b, m, n) with m <= {PADDED_SIDES[-1]} in {', '.join(map(str, TRITON_DTYPES))}"
        raise ValueError(f"G must be {wanted}, got {tuple(G.shape)} {G.dtype}")
    if work_dtype not in TRITON_DTYPES:
        raise ValueError(f"the work dtype must be one of {', '.join(map(str, TRITON_DTYPES))}, got {work_dtype}")
    if G.size(2) > _longest(G.size(1)):
        raise ValueError(f"G must have at most {_longest(G.size(1))} columns, got {tuple(G.shape)}")
    if C.shape != G.shape or device_of(C) != device_of(G) or C.dtype not in (work_dtype, torch.float32):
        wanted = f"{tuple(G.shape)} {work_dtype} or torch.float32 on {device_of(G)}"
        raise ValueError(f"C must be {wanted}, got {tuple(C.shape)} {C.dtype} on {device_of(C)}")
    check_steps(steps)
    if not 0 < scale < float("inf") or not eps >= 0:
        raise ValueError(f"scale must be positive and finite and eps at least 0, got {scale} and {eps}")
    if not extent(C).distinct:
        raise ValueError(f"C must have a place for each entry, got {tuple(C.shape)} with strides {C.stride()}")
    if torch._C._is_alias_of(G, C):
        raise ValueError("C must not share its storage with G")


def _longest(m: int) -> int:
    """Return the largest number of columns for which offsets into X fit into 31 bits."""
    return 2**31 // padded_side(m) - PADDED_SIDES[-1]


small_polar_ = define_operation(
    "small_polar_",
    "(Tensor G, Tensor(a!) C, float[] steps, float scale, float eps, ScalarType work_dtype) -> ()",
    {"cuda": _on_gpu, "cpu": _on_cpu, "meta": check_operands},
)
