"""The compiled operations: passes over memory before and after the orthogonalization, copies, and CPU products.

    momentum_pack_(momentum, gradient, packed, beta, nesterov, maximize=False, *,
                   offsets=None, active=None, grad_scale=None, found_inf=None, momentum_scale=None, norms=None)

        g = ±gradient / grad_scale        minus if `maximize`
        m = lerp(m, g, 1 - beta)          written to `momentum`
        u = lerp(m, g, 1 - beta)          with `nesterov`, from the m just computed, before it is rounded; else m
        packed = u
        norms = |packed|_F                of each matrix

        lerp(m, g, w) = m + w (g - m)     and g for w = 1, where m may be infinite or NaN

    descend_(parameter, update, lr, weight_decay, multiplier, decay_mode=0, *,
             offsets=None, row_scale=None, seeds=None, origins=None, active=None, found_inf=None, remainder=None,
             norms=None)

        p = row_scale (p keep - lr multiplier u)
        norms = |u|_F                     of each matrix
        keep = 1 - lr weight_decay        decay_mode 0, decoupled
               1 - weight_decay           1, independent
               1 - lr weight_decay        2, cautious: where p and u have one sign, else 1

    move_blocks_(matrices, buffer, blocks, to_buffer)

        matrices[position + i, top + r, left + c] = buffer[offset + i step + r row_step + c]
                                          for all i < count, r < rows, c < cols; with `to_buffer` the reverse copy

    frobenius_norm_(norms, X)

        norms = |X|_F                     of each matrix

    normalize_(out, X, norms, eps, scale)

        out = scale X / max(norms, eps)

    gemm_(C, A, B, D, alpha, beta, symmetric, instructions)

        C = alpha A B + beta D            without beta D where `D` is None

    newton_schulz_(X, A, B, coefficients, alone, instructions)

        A = X Xᵀ,  B = c A A + b A,  X = B X + a X        for each a, b, c of the coefficients

    gram_newton_schulz_(X, R, H, Q, T, coefficients, windows, alone, instructions, square_instructions)

        R = X Xᵀ                                          for each window, then
        H = c R R + b R + a I,  Q = Q H,  R = H R H       for each a, b, c of its steps, then
        X = Q X

    hopper_gemm_(C, A, B, D, alpha, beta, diagonal, sections=1)

        C = alpha A B + beta D + diagonal I       symmetric, on GPUs; documented in `hopper_gemm.py`

Lists hold B matrices of any strides. Each list and each buffer has one dtype: float32, float64, float16 or bfloat16.
Arithmetic is in float64 if any of them is float64, else in float32, and each result is rounded once. A result depends
on its own inputs alone: not on the rest of the list, strides, threads or level of x86-64 (up to v4).

- `packed` and `update` are (B, rows, cols) of any strides, such as the `.mT` of a contiguous buffer. With `offsets`
  (where each matrix begins, in elements) they are contiguous and 1-D, and matrices may differ in shape.
- `lr`, `weight_decay`, `multiplier` (1 or B elements) and `grad_scale` (1) are float32 or float64; `active` (B) is
  bool, `found_inf` (1) float32, `seeds` (B) int64. Each may be on the CPU, where it is read at the call, or on the
  matrices' device, where the kernel reads it without a synchronization.
- `row_scale` is float32 and has one entry per row: the rows of the first matrix, then those of the second, and so on.
- A matrix that is not `active` keeps its momentum and parameter, and its packed part is zero. The same holds for all
  matrices if `found_inf` is not 0.
- `seeds` makes the rounding of float16 and bfloat16 parameters stochastic, without bias. The random bits follow from
  the seed and from an element's index in the whole matrix, so a shard is rounded as it would be in the whole matrix.
  For that, `origins` has (first_row, first_col, row_length) of each shard, 3 B numbers. Without `seeds` it is not used.
- `remainder` is B int16 matrices. Together with bfloat16 parameters they are the two halves of float32 numbers, as in
  `kernels/master_weights.py`. Both are written, and together have the bits that float32 parameters would have: the
  result is rounded to float32 once. Cannot be combined with `seeds`.
- `momentum_scale`, B float32 matrices, says that momentum has 8 bits: B int8 matrices of codes. Blocks of 64 neighbours
  share a scale. If they are neighbours in a row, scales are (rows, ceil(cols / 64)); if in a column,
  (ceil(rows / 64), cols). Then m = scale code |code|, with scale = max |m| / 127^2, at least 2^-126, and the nearest
  code. In a block with the largest magnitude M, an element m loses at most sqrt(M |m|) / 127 + M / (4 127^2), which is
  at most M / 126 (`optimizer_common/quantize.h`). `packed` is computed from m before it is coded. A block that receives
  a NaN or an infinity stays NaN.
- `norms` (B), contiguous, are the norms of what is stored in `packed` or `update`, of the dtype and the bits that
  `frobenius_norm_` gives for it, or for its `.mT` if it has more rows than columns. Where `packed` is zero because of
  `active` or `found_inf`, so is the norm. That of an update is written even if its parameter does not change. Cannot be
  combined with `offsets` or with a `packed` or `update` of float64.

RuntimeError is raised, before anything is written, for arguments that do not fit, for written tensors that overlap
themselves, and for those that certainly share memory with another argument. Certain means that one starts at the
other's first element, or that one starts inside the other and the other has no gaps; `packed` and `update` count as a
whole. Two kinds of overlap are not detected, and make the result undefined: two tensors with gaps that start at
different elements, and a tensor without gaps that starts inside one with gaps. They cannot be told from columns of
one matrix, which do not overlap and may be entries of a list.

`move_blocks_` takes matrices (B, m, n) of any strides, each size below 2^31, and a contiguous 1-D buffer of the same
dtype, one of the four above. `blocks` (N, 9) is int64, contiguous, always on the CPU, and read at the call. Each row
has the fields of `plan.blocks.Block` in their order: count, position, top, left, rows, cols, offset, step, row_step.

- Bits are copied, so a NaN keeps its payload. Elements that no block covers keep their bits; empty blocks do nothing.
- Negative numbers, and blocks that reach beyond the matrices or the buffer, raise RuntimeError, also before anything is
  written.
- Blocks that write one element twice are not detected: it gets one of the values, not always the same.
- On a GPU a launch takes 640 blocks by value, so no table is copied to the device or kept there.

`frobenius_norm_` and `normalize_` take batches (B, m, n) of any strides, float32, float16 or bfloat16, and `norms` (B),
contiguous, in `formats.exact_dtype` of the device: float64, or float32 where it has none, as on Apple's GPUs. Arguments
that do not fit raise RuntimeError before anything is written.

- Squares are summed in float64, where the square of a float32 number is exact and cannot overflow. The order of the sum
  follows from m and n alone. scale / max(norms, eps, 2^-126) is rounded to float32 once, at most to its largest number.
  Each product with it is rounded to float32 once, too, before the cast.
- A matrix and the same matrix times a power of two give the same bits, as long as the norm and its inverse are normal
  numbers.

`gemm_` takes batches A (b, m, k), B (b, k, n), D and C (b, m, n), all float32 or all bfloat16, on the CPU. C and D may
also both be float32 where A and B are bfloat16. C and D have contiguous rows, A and B contiguous rows or columns. A, B
and D may share memory. C must not share memory with them, with one exception: without `symmetric`, C may be B itself,
which the result replaces, and then D may be that tensor, too.

- Sums are in float32, in an order that follows from k alone, with one rounding at the end: a matrix gets the same bits
  alone and in any batch, with any number of threads. Different `instructions` may round differently, and "portable"
  sums of float32 differ between x86-64 and ARM. With "amx" and "avx512_bf16" numbers below 2^-126 in A and B, and sums
  below it, are zero.
- `symmetric` says that the results are symmetric (m = n; D too). Only blocks on and below the diagonal are computed,
  and are also stored mirrored, so C is symmetric to the bit.
- `instructions` are "amx", "avx512_bf16" or "portable" for bfloat16, and "avx512", "avx2" or "portable" for float32;
  `gemm_instructions` returns the best ones here. Instructions that this processor or system lacks, and arguments that
  do not fit, raise RuntimeError before anything is written. The AMX configuration of each thread is restored.

`newton_schulz_` takes X (b, m, n) with contiguous rows, and room for A and B: two contiguous tensors (rooms, m, m), at
least one room. All are float32 or all bfloat16, on the CPU, and share no memory. `coefficients` are three numbers for
each step. X gets, bit for bit, what three calls of `gemm_` for each step would make of it, the first two of them
`symmetric`, with the same `instructions`. What is left in A and B is not defined.

`gram_newton_schulz_` takes the same X, and four squares like A and B, but in float32, whatever X is. `windows` are the
numbers of steps in each window, at least one. Q begins as the first H, and R is not needed after the last. A window of
one step leaves a I out of H, and computes X = Q X + a X.

- Each product is that of a call of `gemm_`: X Xᵀ and Q X with `instructions`, Q rounded to X's dtype before; those of
  squares are `symmetric` and with `square_instructions`, which are instructions for float32. H R H is H T with T = R H.
- a is added to the diagonal in float32, after H is rounded to it. What is left in the squares is not defined.

In both:

- With `alone` each thread takes one matrix after another through all steps, and waits for no other thread: faster if a
  core's cache holds a matrix. That takes as many rooms as threads. Matrices that are left over, because there are fewer
  than threads, are shared by all threads, product by product. So is every matrix without `alone`, or if there are
  fewer rooms than threads.

A variant without a compiled library has the same operations in torch's functions (`portable/`), on every device that
torch has. Their names begin with "portable_", because compiled ones of the same commit have the same namespace. All of
the above holds there, with these differences. Products that feed a sum are rounded before it. Squares in a norm are
summed in another order. `gemm_` takes only "portable", and sums in float64 in torch's order. Calls of any number of
tiles are taken. `hopper_gemm_` raises NotImplementedError.

On a device without float64 (`formats.exact_dtype`) no tensor has that dtype. Numbers are computed in float32, unless
all of them are on the CPU. A norm is that of a matrix scaled by a power of two, so that no square overflows, and those
that vanish do not count. It errs by at most (18 + t) / 2 roundings to float32, t = ceil(log2(ceil(m n / 16))), and is
infinite if float32 cannot hold it. scale / max(norms, eps, 2^-126) is rounded twice.
"""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

import torch

from .build_metadata import library_name
from .formats import dtype_name
from .tracing import constant_while_traced

# The name of the compiled library, and of the namespace of its operations.
LIBRARY = library_name()
# Whether this variant came without one. Then the operations are defined here, in torch's functions.
IS_PORTABLE = LIBRARY is None
if IS_PORTABLE:
    from .portable.operations import OPERATIONS

# Copies of a variant that are loaded from several folders share the library of the first: a second one that registered
# the same operations would end the process.
if IS_PORTABLE or not hasattr(getattr(torch.ops, LIBRARY), "descend_"):
    from .._ops import add_op_namespace_prefix, ops
else:
    ops, add_op_namespace_prefix = getattr(torch.ops, LIBRARY), f"{LIBRARY}::{{}}".format

# Begins the name of each operation, since a compiled and a portable variant of one commit have the same namespace and
# may be loaded in one process.
PREFIX = "portable_" if IS_PORTABLE else ""


def define_operation(
    name: str, schema: str, functions: Mapping[str, Callable], tags: Sequence[torch.Tag] = ()
) -> torch._ops.OpOverloadPacket:
    """Define an operation of this variant and return it.

    `functions` are by kind of device: "default" is every kind, "meta" is for tracing. As for compiled operations,
    autograd takes no note of what they write. If another copy in the process has defined the operation, copies share
    it. Copies of one commit have the same code, except builds with uncommitted changes: there the first copy's runs.
    """
    if hasattr(ops, PREFIX + name):
        return getattr(ops, PREFIX + name)
    # `torch.library.custom_op` looks for its caller's source in all modules of the process: milliseconds for each call.
    torch.library.define(add_op_namespace_prefix(PREFIX + name), schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    for devices, function in functions.items():
        torch.library.impl(add_op_namespace_prefix(PREFIX + name), devices, torch.no_grad()(function))
    return getattr(ops, PREFIX + name)


def returns_nothing(*arguments, **options) -> None:
    """What an operation does while it is traced: it returns nothing, so tracing needs no shapes."""


def _traceable(name: str) -> torch._ops.OpOverloadPacket:
    """Return an operation of this variant that returns nothing, after making it traceable."""
    # Not by `torch.library.register_fake`, which looks for its caller's source as well. Torch 2.11 refuses to register
    # a function twice, and another copy of this variant may have registered it.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix(PREFIX + name), "Meta"):
        torch.library.impl(add_op_namespace_prefix(PREFIX + name), "meta", returns_nothing)
    return getattr(ops, PREFIX + name)


if IS_PORTABLE:
    for name, (schema, function) in OPERATIONS.items():
        define_operation(name, schema, {"default": function} if function else {})


momentum_pack_ = _traceable("momentum_pack_")
descend_ = _traceable("descend_")
move_blocks_ = _traceable("move_blocks_")
frobenius_norm_ = _traceable("frobenius_norm_")
normalize_ = _traceable("normalize_")
gemm_ = _traceable("gemm_")
newton_schulz_ = _traceable("newton_schulz_")
gram_newton_schulz_ = _traceable("gram_newton_schulz_")
hopper_gemm_ = _traceable("hopper_gemm_")
_gemm_instructions = getattr(ops, PREFIX + "gemm_instructions")


@constant_while_traced
def gemm_instructions(dtype: torch.dtype) -> str:
    """Return the best `instructions` of this processor and system for matrices of a dtype, float32 or bfloat16."""
    return _gemm_instructions(dtype_name(dtype))
