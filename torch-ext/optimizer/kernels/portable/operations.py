"""The table of operations: their schemas, which are those of `torch-ext/torch_binding.cpp`, and their functions."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

import torch

from . import descend, gemm, momentum_pack, move_blocks, norms


class Operation(NamedTuple):
    """An operation: arguments and result, and what it does on every device; None if it runs on none."""

    schema: str
    function: Optional[Callable]


def _without_gradients(function: Callable) -> Callable:
    """Return a function that writes to parameters, of which autograd takes no note, as of compiled operations."""
    return torch.no_grad()(function)


OPERATIONS = {
    "momentum_pack_": Operation(momentum_pack.SCHEMA, _without_gradients(momentum_pack.momentum_pack_)),
    "descend_": Operation(descend.SCHEMA, _without_gradients(descend.descend_)),
    "move_blocks_": Operation(move_blocks.SCHEMA, _without_gradients(move_blocks.move_blocks_)),
    "frobenius_norm_": Operation(norms.NORM_SCHEMA, _without_gradients(norms.frobenius_norm_)),
    "normalize_": Operation(norms.NORMALIZE_SCHEMA, _without_gradients(norms.normalize_)),
    "gemm_": Operation(gemm.SCHEMA, _without_gradients(gemm.gemm_)),
    "gemm_instructions": Operation(gemm.INSTRUCTIONS_SCHEMA, gemm.gemm_instructions),
    # Compiled for GPUs of compute capability 9.0 or not at all: `hopper_gemm.runs_on` asks for it.
    "hopper_gemm_": Operation(
        "(Tensor(a!) C, Tensor A, Tensor B, Tensor? D, float alpha, float beta, float diagonal) -> ()", None
    ),
}
