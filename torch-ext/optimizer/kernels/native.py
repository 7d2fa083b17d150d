"""The compiled operations: passes over memory before and after the orthogonalization, copies, and CPU products.

    operation                            what it does                                        contract

    momentum_pack_                       updates momentum, packs directions into one buffer  portable/momentum_pack.py
    descend_                             applies weight decay and updates to parameters      portable/descend.py
    move_blocks_                         copies blocks between matrices and a message        portable/move_blocks.py
    frobenius_norm_, normalize_          the norm of each matrix; matrices divided by it     portable/norms.py
    gemm_, gemm_instructions             a product on a CPU; the best instructions for it    portable/gemm.py
    newton_schulz_, gram_newton_schulz_  all products of an iteration on a CPU               portable/newton_schulz.py
    hopper_gemm_                         the symmetric product on compute capability 9.0     gpu/hopper_gemm.py

A contract has the operation's formula, what its arguments are, and which bits a result has. Where a contract names no
devices, the operation runs on CPUs and on CUDA GPUs. The following holds for all of them but `hopper_gemm_`.

A result depends on its own inputs alone: not on other matrices of the call, strides, threads or level of x86-64 (up to
v4). That of `gemm_` and the iterations also depends on `instructions`.

RuntimeError is raised, before anything is written, for arguments that do not fit, for written tensors whose elements do
not certainly have different addresses (each stride must exceed the extent of all smaller ones), and for those that
certainly share memory with another argument. Here certain means that one starts at the other's first element, or that
one starts inside the other and the other has no gaps; `packed` and `update` count as a whole. Two kinds of overlap are
not detected, and make the result undefined: two tensors with gaps that start at different elements, and a tensor
without gaps that starts inside one with gaps. They cannot be told from columns of one matrix, which do not overlap and
may be entries of a list.

A variant without a compiled library has the same operations in torch's functions (`portable/`), on every device that
torch has. Their names begin with "portable_", because compiled ones of the same commit have the same namespace. The
contracts hold there, with these differences. Products that feed a sum are rounded before it. Squares in a norm are
summed in another order. Codes of 8-bit momentum may differ by one where two are almost equally near. No number of tiles
is too large. `hopper_gemm_` raises NotImplementedError.

On a device without float64 (`formats.exact_dtype`) no tensor has that dtype. Numbers are computed in float32, unless
all of them are on the CPU.
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
