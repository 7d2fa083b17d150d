"""The compiled operations: passes over memory before and after the orthogonalization, copies, and products on a CPU.

    momentum_pack_(momentum, gradient, packed, beta, nesterov, maximize=False, *,
                   offsets=None, active=None, grad_scale=None, found_inf=None, momentum_scale=None)

        g = ±gradient / grad_scale        minus if `maximize`
        m = lerp(m, g, 1 - beta)          written to `momentum`
        u = lerp(m, g, 1 - beta)          with `nesterov`, from the m just computed, before it is rounded; else m
        packed = u

    descend_(parameter, update, lr, weight_decay, multiplier, decay_mode=0, *,
             offsets=None, row_scale=None, seeds=None, origins=None, active=None, found_inf=None, remainder=None)

        p = row_scale (p keep - lr multiplier u)
        keep = 1 - lr weight_decay        decay_mode 0, decoupled
               1 - weight_decay           1, independent
               1 - lr weight_decay        2, cautious: where p and u have one sign, else 1

    move_blocks_(matrices, buffer, blocks, to_buffer)

        matrices[position + i, top + r, left + c] = buffer[offset + i step + r row_step + c]
                                          for all i < count, r < rows, c < cols; the other way round `to_buffer`

    frobenius_norm_(norms, X)

        norms = |X|_F                     of each matrix, in float64

    normalize_(out, X, norms, eps, scale)

        out = scale X / max(norms, eps)

    gemm_(C, A, B, D, alpha, beta, symmetric, instructions)

        C = alpha A B + beta D            without beta D where `D` is None

    hopper_gemm_(C, A, B, D, alpha, beta, diagonal)

        C = alpha A B + beta D + diagonal I       symmetric, on GPUs; `hopper_gemm.py` has its contract

Lists hold B matrices of any strides. A list or buffer has one dtype, each its own: float32, float64, float16 or
bfloat16. Arithmetic is in float64 if one of them is, else in float32, and each result is rounded once. A result
depends on its own inputs alone: not on the rest of the list, strides, threads or level of x86-64 (up to v4).

- `packed` and `update` are (B, rows, cols) of any strides, such as the `.mT` of a contiguous buffer. With `offsets`,
  a place in elements for each matrix, they are contiguous and 1-D, and matrices may differ in shape.
- `lr`, `weight_decay`, `multiplier` (1 or B elements) and `grad_scale` (1) are float32 or float64; `active` (B) is
  bool, `found_inf` (1) float32, `seeds` (B) int64. Each is on the CPU, read at the call, or on the device of the
  matrices, read there without a synchronization.
- `row_scale` is float32 with an entry per row, those of all matrices one after another.
- A matrix that is not `active`, or any when `found_inf` is not 0, keeps momentum and parameter, and packs zeros.
- `seeds` rounds float16 and bfloat16 parameters stochastically, without bias. The random bits follow from the seed
  and from an element's index in the whole matrix, for which `origins` tells (first_row, first_col, row_length) of
  each shard, 3 B numbers: a shard is rounded as the whole would be. Without `seeds` it is not used.
- `remainder`, B int16 matrices, and bfloat16 parameters are the halves of float32 numbers, as `rules/master_weights.py`
  has them. Both are written, and have together the bits that float32 parameters would have: the result is rounded to
  float32 once. Not with `seeds`.
- `momentum_scale`, B float32 matrices, says that momentum is in 8 bits: B int8 matrices of codes. Blocks of 64
  neighbours in a row share a scale, which is (rows, ceil(cols / 64)), or in a column, (ceil(rows / 64), cols). Then
  m = scale code |code|, with scale = max |m| / 127^2, at least 2^-126, and the nearest code: of an m in a block whose
  largest is M, at most sqrt(M |m|) / 127 + M / (4 127^2) is lost, M / 126 (`optimizer_common/quantize.h`). `packed` is
  of the m before that. A block with a NaN or an infinity is NaN from then on.

Arguments that do not fit, written tensors that overlap themselves, and those that certainly share memory with another
argument raise RuntimeError before anything is written. Certain means: one starts at the other's first element, or
within the other and that one has no gaps; `packed` and `update` count as a whole. Not detected is an overlap of two
with gaps that start apart, or of one without gaps that starts in one with gaps: the columns of one matrix, which may
be entries of a list, look like that. Then the result is undefined.

`move_blocks_` takes matrices (B, m, n) of any strides, each size below 2^31, and a contiguous 1-D buffer of the same
dtype, one of the four. `blocks` (N, 9), int64 and contiguous on the CPU whatever the device, is read at the call; a row
has the fields of `plan.blocks.Block` in their order: count, position, top, left, rows, cols, offset, step, row_step.

- Bits are copied, so that a NaN stays the one it is. What no block covers keeps its bits; empty blocks do nothing.
- Rows that are negative, or reach beyond matrices or buffer, raise RuntimeError as well, before anything is written.
- An element that blocks write twice is not detected: it gets one of its values, not always the same.
- On a GPU a launch takes 640 blocks, by value: no table is copied to the device or kept there.

`frobenius_norm_` and `normalize_` take batches (B, m, n) of any strides, float32, float16 or bfloat16, and `norms` (B),
float64, contiguous. Arguments that do not fit raise RuntimeError before anything is written.

- Squares are summed in float64, where those of float32 are exact and do not overflow, in an order that follows from m
  and n alone. scale / max(norms, eps, 2^-126) is rounded to float32 once, at most to its largest number, and so is each
  product, before the cast.
- A matrix times a power of two gives the same bits, as long as its norm and the inverse of it are normal numbers.

`gemm_` takes batches A (b, m, k), B (b, k, n), D and C (b, m, n), all bfloat16 on the CPU, C and D with rows as runs of
memory, A and B with rows or columns. A, B and D may share memory. C shares none with another one, but where it is not
symmetric B may be C itself, which is replaced by the result, and then D, too.

- Sums are in float32, in an order that follows from k alone, with one rounding at the end: a matrix gets the same bits
  alone and in any batch, from any number of threads. Other `instructions` may round otherwise, and those of the
  processor take numbers below 2^-126 in A and B, and sums below it, for zero.
- `symmetric` says that the results are symmetric (m = n; D too): only blocks on and below the diagonal are computed
  and stored mirrored as well, so that C is symmetric to the bit.
- `instructions` are "amx", "avx512_bf16" or "portable"; `gemm_instructions()` says which are best here. Those that this
  processor or system lacks, and arguments that do not fit, raise RuntimeError before anything is written. Each
  thread's configuration of AMX is left as it was found.
"""

from __future__ import annotations

import torch

from .._ops import add_op_namespace_prefix, ops

# Neighbours that share a scale in momentum of 8 bits: kBlock of the compiled operations.
BLOCK = 64

momentum_pack_ = ops.momentum_pack_
descend_ = ops.descend_
move_blocks_ = ops.move_blocks_
frobenius_norm_ = ops.frobenius_norm_
normalize_ = ops.normalize_
gemm_ = ops.gemm_
hopper_gemm_ = ops.hopper_gemm_


@torch.compiler.assume_constant_result
def gemm_instructions() -> str:
    """Return the best `instructions` of this processor and system: "amx", "avx512_bf16" or "portable"."""
    return ops.gemm_instructions()


@torch.library.register_fake(add_op_namespace_prefix("momentum_pack_"))
def _momentum_pack_fake(*arguments, **options) -> None:
    """Nothing is returned, so that tracing needs no shapes."""


@torch.library.register_fake(add_op_namespace_prefix("descend_"))
def _descend_fake(*arguments, **options) -> None:
    """Nothing is returned, so that tracing needs no shapes."""


@torch.library.register_fake(add_op_namespace_prefix("move_blocks_"))
def _move_blocks_fake(*arguments, **options) -> None:
    """Nothing is returned, so that tracing needs no shapes."""


@torch.library.register_fake(add_op_namespace_prefix("frobenius_norm_"))
def _frobenius_norm_fake(*arguments, **options) -> None:
    """Nothing is returned, so that tracing needs no shapes."""


@torch.library.register_fake(add_op_namespace_prefix("normalize_"))
def _normalize_fake(*arguments, **options) -> None:
    """Nothing is returned, so that tracing needs no shapes."""


@torch.library.register_fake(add_op_namespace_prefix("gemm_"))
def _gemm_fake(*arguments, **options) -> None:
    """Nothing is returned, so that tracing needs no shapes."""


@torch.library.register_fake(add_op_namespace_prefix("hopper_gemm_"))
def _hopper_gemm_fake(*arguments, **options) -> None:
    """Nothing is returned, so that tracing needs no shapes."""
