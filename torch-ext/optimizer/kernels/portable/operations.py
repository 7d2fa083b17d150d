"""The table of operations: their schemas, which are those of `torch-ext/torch_binding.cpp`, and their functions."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

from . import descend, gemm, momentum_pack, move_blocks, newton_schulz, norms


class Operation(NamedTuple):
    """An operation: arguments and result, and what it does on every device; None if it runs on none."""

    schema: str
    function: Optional[Callable]


OPERATIONS = {
    "momentum_pack_": Operation(momentum_pack.SCHEMA, momentum_pack.momentum_pack_),
    "descend_": Operation(descend.SCHEMA, descend.descend_),
    "move_blocks_": Operation(move_blocks.SCHEMA, move_blocks.move_blocks_),
    "frobenius_norm_": Operation(norms.NORM_SCHEMA, norms.frobenius_norm_),
    "normalize_": Operation(norms.NORMALIZE_SCHEMA, norms.normalize_),
    "gemm_": Operation(gemm.SCHEMA, gemm.gemm_),
    "newton_schulz_": Operation(newton_schulz.SCHEMA, newton_schulz.newton_schulz_),
    "gram_newton_schulz_": Operation(newton_schulz.GRAM_SCHEMA, newton_schulz.gram_newton_schulz_),
    "gemm_instructions": Operation(gemm.INSTRUCTIONS_SCHEMA, gemm.gemm_instructions),
    # Compiled for GPUs of compute capability 9.0 or not at all: `hopper_gemm.is_built` says which.
    "hopper_gemm_": Operation(
        "(Tensor(a!) C, Tensor A, Tensor B, Tensor? D, float alpha, float beta, float diagonal, int sections=1) -> ()",
        None,
    ),
}
