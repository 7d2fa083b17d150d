"""Plain tensors that may be parts of larger matrices: nothing in their shape or type shows it, only a mark does."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ..parameters.names import named_parameters
from .layout import has_shards
from .process_groups import world_size

# Megatron-LM's tensor-parallel layers and DeepSpeed's AutoTP set it, Megatron-LM also where one rank has all of it.
_MARK = "tensor_model_parallel"


def plain_parts(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line about plain tensors for Muon that are marked as tensor-parallel, if there is more than one rank."""
    marked = [
        name
        for group in groups
        if group["use_muon"]
        for name, p in named_parameters(group)
        if getattr(p, _MARK, False) and not has_shards([type(p)])
    ]
    if not marked or world_size() == 1:
        return []
    return [
        f"plain tensors with {_MARK}=True are among Muon's parameters: {len(marked)}, such as {marked[0]}. That is a "
        "mark of Megatron-LM's tensor parallelism and of DeepSpeed's AutoTP. Where ranks hold parts, Muon would "
        "orthogonalize each part alone, which is another update than that of the whole matrix: make them DTensors, as "
        f"torch.distributed.tensor.parallel does. Where each rank holds whole matrices, set {_MARK} to False"
    ]
