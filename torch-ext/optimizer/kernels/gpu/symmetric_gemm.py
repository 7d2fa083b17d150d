"""Symmetric product C = alpha A B + beta D + diagonal I, where mirrored tiles of the result are computed once.

    A  (b, m, k)  float16, bfloat16 or float32, any strides
    B  (b, k, m)  like A: A.mT, or any operand with which the result is symmetric, such as two polynomials of one matrix
    D  (b, m, m)  like A, symmetric (not checked, since the check would read it a second time), or None
    C  (b, m, m)  like A, of any strides, overlapping none of them; bit for bit symmetric

With t = ceil(m / WIDTH) squares a side, t (t + 1) / 2 of t² are computed: half the FLOPs of a full product for large t,
and all of them for t = 1. Sums run in float32 in one order, from k = 0 up. The order does not depend on the batch or
the grid, so a matrix gets the same bits alone and in a batch. The result is rounded once.

Operands are read through tensor descriptors (TMA) if the device has them and the layout allows it, else by pointers.
Sources: grouped tile order, Triton's matmul tutorial; products of polynomials of a Gram matrix, Dao-AILab,
https://github.com/Dao-AILab/gram-newton-schulz.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..native import define_operation
from ..operands import check_operands, fits_descriptor, is_aligned
from ..speeds.measurements import Ranks
from . import hopper_gemm
from .tiles import grouped_lower_triangle, load_panel, store_tile
from .tuned import COMPILED, HOPPERS, Config, Target, chosen_config, safe_config, target_of


@triton.jit(do_not_specialize=["side"])  # used only to count: kernels specialized for 1 or 16 would gain nothing
def _symmetric_gemm_kernel(
    A, B, D, C,  # pointers; A and B, which is the header's B.mT, are (b, m, k), and descriptors with DESCRIPTORS
    alpha, beta, diagonal,
    m, k, side,  # rows, length of the sums, squares of WIDTH a side
    A_batch, A_row, A_k,
    B_batch, B_row, B_k,
    D_batch, D_row, D_col,
    C_batch, C_row, C_col,  # strides in elements
    HAS_D: tl.constexpr, DESCRIPTORS: tl.constexpr, A_K_INNER: tl.constexpr, B_K_INNER: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program computes TILE rows of a square of WIDTH of one matrix A Bᵀ: a tile, or two beside each other.

    In a square on the diagonal, the right one of two tiles may lie above the diagonal. Then it is not stored.
    """
    TILES: tl.constexpr = WIDTH // TILE
    programs = side * (side + 1) // 2 * TILES
    matrix, number = tl.program_id(0) // programs, tl.program_id(0) % programs
    i, j = grouped_lower_triangle(number // TILES, side, GROUP)
    i, j = i * TILES + number % TILES, j * TILES
    rows = i * TILE + tl.arange(0, TILE)
    cols = j * TILE + tl.arange(0, WIDTH)
    inner = tl.arange(0, TILE_K)
    wide_rows, wide_cols, wide_matrix = rows.to(tl.int64), cols.to(tl.int64), matrix.to(tl.int64)
    wide_inner, wide_step = inner.to(tl.int64), tl.cast(TILE_K, tl.int64)
    if not DESCRIPTORS:
        a_places = A + wide_matrix * A_batch + wide_rows[:, None] * A_row + wide_inner[None, :] * A_k
        b_places = B + wide_matrix * B_batch + wide_inner[:, None] * B_k + wide_cols[None, :] * B_row

    sums = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        if DESCRIPTORS:
            a = load_panel(A, matrix, i * TILE, start, A_K_INNER, TILE, TILE_K)
            b = load_panel(B, matrix, j * TILE, start, B_K_INNER, WIDTH, TILE_K).T
        else:
            left = inner < k - start
            a = tl.load(a_places, mask=(rows < m)[:, None] & left[None, :], other=0.0)
            b = tl.load(b_places, mask=left[:, None] & (cols < m)[None, :], other=0.0)
            a_places += wide_step * A_k
            b_places += wide_step * B_k
        sums = tl.dot(a, b, sums, input_precision="ieee")

    mask = (rows < m)[:, None] & (cols < m)[None, :]
    result = alpha * sums
    if i // TILES == j // TILES:  # not where tiles are stored: together they take too many registers on sm_90
        result = tl.where(rows[:, None] == cols[None, :], result + diagonal, result)
    if HAS_D:
        d_places = D + wide_matrix * D_batch + wide_rows[:, None] * D_row + wide_cols[None, :] * D_col
        result += beta * tl.load(d_places, mask=mask, other=0.0).to(tl.float32)
    result = result.to(C.dtype.element_ty)
    C += wide_matrix * C_batch
    if TILES == 1:
        store_tile(result, (C, C_row, C_col), i, j, m, TILE)
    else:
        left, right = tl.split(tl.permute(tl.reshape(result, (TILE, 2, TILE)), (0, 2, 1)))
        store_tile(left, (C, C_row, C_col), i, j, m, TILE)
        if i > j:
            store_tile(right, (C, C_row, C_col), i, j + 1, m, TILE)


# Two tiles of this side fill the registers with their sums. Larger squares are shared by programs.
LARGEST_TILE = 128


class Launch(NamedTuple):
    """Everything about a launch except the operands' addresses and the scalars, which may change every time."""

    grid: tuple[int, int, int]
    blocks: tuple[list[int], ...]  # block shapes of both panels' descriptors; empty if operands come by pointers
    sizes: tuple[int, ...]
    constants: tuple[Any, ...]
    options: dict[str, int]


def arrange(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor, config: Config) -> Optional[Launch]:
    """Return how `launch_symmetric_gemm` launches for operands of this layout; None if the result is empty."""
    batch, m, k = A.shape
    if batch == 0 or m == 0:
        return None
    panels = A, B.mT
    side, tile = triton.cdiv(m, config.tile), min(config.tile, LARGEST_TILE)
    inner = [panel.stride(2) == 1 for panel in panels]
    descriptors = reads_descriptors(A.device) and all(map(fits_descriptor, panels))
    rows = zip((tile, config.tile), inner)
    blocks = tuple([1, size, config.tile_k] if i else [1, config.tile_k, size] for size, i in rows)
    traits = D is not None, descriptors, *inner
    # D and C are symmetric, so their row and column strides may be exchanged: the larger one is passed first.
    strides = [(x.stride(0), *sorted(x.stride()[1:], reverse=True)) for x in (C if D is None else D, C)]
    return Launch(
        grid=(batch * side * (side + 1) // 2 * (config.tile // tile), 1, 1),
        blocks=blocks if descriptors else (),
        sizes=(m, k, side, *panels[0].stride(), *panels[1].stride(), *strides[0], *strides[1]),
        constants=(*traits, tile, config.tile, config.tile_k, config.group),
        options={"num_warps": config.warps, "num_stages": config.stages},
    )


def launch_symmetric_gemm(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor, scalars: tuple, config: Config) -> Any:
    """Write the product into C by one launch with an explicit configuration; return what Triton compiled for it.

    `scalars` is (alpha, beta, diagonal). The other arguments are those of `symmetric_gemm_`, unchecked. The result is
    None for configurations in COMPILED, which are not Triton's, and if there was nothing to launch.
    """
    if config in COMPILED:
        alpha, beta, diagonal = scalars
        hopper_gemm.hopper_product(A, B, D, alpha, beta, C, diagonal, config.sections)
        return None
    launch = arrange(A, B, D, C, config)
    if launch is None:
        return None
    panels = A, B.mT
    operands = [_describe(*panel) for panel in zip(panels, launch.blocks)] or panels
    return _symmetric_gemm_kernel[launch.grid](
        *operands, C if D is None else D, C, *scalars, *launch.sizes, *launch.constants, **launch.options
    )


def reads_descriptors(device: torch.device) -> bool:
    """Whether kernels on `device` read operands by tensor descriptors: NVIDIA's of compute capability 9.0 to 11.x.

    12.0 has descriptors, too, but the code that Triton 3.6 compiles for it spills; its pointer loads are as wide.
    """
    return device.type == "cuda" and not torch.version.hip and 9 <= torch.cuda.get_device_capability(device)[0] < 12


def chosen_for(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor, among: Optional[Ranks] = None) -> Config:
    """Return the configuration for these operands on the GPU that they are on."""
    return config_for(torch.cuda.get_device_name(A.device), target_of(A.device), (A, B, D, C), among)


def config_for(device_name: str, target: Target, operands: tuple, among: Optional[Ranks] = None) -> Config:
    """Return the configuration with which `symmetric_gemm_` is launched on operands A, B, D and C.

    `among` has the ranks that share the matrices: only what exactly these have agreed on counts (`measured_here`).
    """
    A, B, D, C = operands
    lie = _how_they_lie(A, B, D, C)
    config = chosen_config(device_name, target, A.dtype, A.shape[1:], lie, among)
    if config in COMPILED and not (target == HOPPERS and hopper_gemm.is_built() and hopper_gemm.fits(A, B, D, C)):
        return safe_config(target, A.dtype, A.size(1), *lie)  # always one of Triton's
    return config


def _how_they_lie(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor) -> tuple[bool, bool]:
    """Return whether both operands come by descriptors, and whether all operands are aligned."""
    descriptors = reads_descriptors(A.device) and fits_descriptor(A) and fits_descriptor(B.mT)
    return descriptors, is_aligned(A, B, C) and (D is None or is_aligned(D))


def symmetric_gemm(
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Optional[Tensor] = None,
    diagonal: float = 0.0,
) -> Tensor:
    """Return alpha A B + beta D + diagonal I (b, m, m) of A (b, m, k), B (b, k, m), symmetric D; written to `out`.

    `out` None is a new tensor. The result is bit for bit symmetric and has no gradient. A NaN in D reaches it even if
    `beta` is 0. No kernel is compiled for the values of `alpha`, `beta` and `diagonal`. Errors: `check_operands`.
    """
    if A.ndim != 3:
        raise ValueError(f"A must be (b, m, k), got {tuple(A.shape)}")
    C = A.new_empty(A.size(0), A.size(1), A.size(1)) if out is None else out
    symmetric_gemm_(A, B, D, C, alpha, beta, diagonal)
    return C


def _on_gpu(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor, alpha: float, beta: float, diagonal: float) -> None:
    """Write alpha A B + beta D + diagonal I into C."""
    check_operands(A, B, D, C)
    with torch.cuda.device(A.device):  # Triton launches on the current device, not on that of the arguments
        launch_symmetric_gemm(A, B, D, C, (alpha, beta, diagonal), chosen_for(A, B, D, C))


def _on_cpu(A, B, D, C, alpha, beta, diagonal) -> None:
    """Compute what the kernel computes, with torch's product: the lower triangle and its mirror image."""
    check_operands(A, B, D, C)
    product = alpha * torch.bmm(A.float(), B.float())
    product = product if D is None else product + beta * D.float()
    product.diagonal(dim1=1, dim2=2).add_(diagonal)
    product = product.to(C.dtype)
    C.copy_(product.tril() + product.tril(-1).mT)


symmetric_gemm_ = define_operation(
    "symmetric_gemm_",
    "(Tensor A, Tensor B, Tensor? D, Tensor(a!) C, float alpha, float beta, float diagonal) -> ()",
    {"cuda": _on_gpu, "cpu": _on_cpu, "meta": lambda A, B, D, C, *scalars: check_operands(A, B, D, C)},
)


def _describe(panel: Tensor, block: list[int]) -> TensorDescriptor:
    described = panel if panel.stride(2) == 1 else panel.mT
    return TensorDescriptor(described, list(described.shape), list(described.stride()), block)
