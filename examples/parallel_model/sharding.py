"""One pipeline stage of the model on a mesh: tensor and expert parallelism inside, FSDP2 around.

A mesh of 2 x 2 x 2 = `pp` x `dp` x `tp`. The stage's attention and dense MLPs are split over `tp`; the experts are
dealt out over the same processes, which see the same tokens. Of an expert that is here each process of `dp` holds some
rows.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from .model import Block, Experts, Transformer, loss_of

MESH = {"pp": 2, "dp": 2, "tp": 2}
MICROBATCHES = 4

STYLES = {
    **{f"attn.{name}": ColwiseParallel for name in "qkv"},
    "attn.proj": RowwiseParallel,
    "mlp.up": ColwiseParallel,
    "mlp.down": RowwiseParallel,
}


class ExpertParallel(ParallelStyle):
    """Deals out stacks of experts; each process sums its own ones over all tokens, and the sums are added up."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, _deal_out_, _share_of_inputs, _sum_of_outputs)


def _deal_out_(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, p in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)], src_data_rank=None)))


def _share_of_inputs(module: nn.Module, inputs: tuple[Tensor, Tensor], mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Return all tokens, whose gradients are summed over the mesh, and the weights of the experts that are here."""
    x, weights = (DTensor.from_local(value, mesh, [Replicate()]) for value in inputs)
    return x.to_local(grad_placements=[Partial()]), weights.redistribute(
        placements=[Shard(weights.ndim - 1)]
    ).to_local()


def _sum_of_outputs(module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(output, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def shard_stage_(model: Transformer, mesh: DeviceMesh) -> None:
    """Make of the whole model this process's part of its stage."""
    model.keep_stage_(mesh["pp"].get_local_rank(), mesh["pp"].size())
    for block in model.layers.values():
        parallelize_module(block, mesh["tp"], _styles_of(block))
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False, shard_placement_fn=_rows_of_experts)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)


def _styles_of(block: Block) -> dict[str, ParallelStyle]:
    parts = dict(block.named_modules())
    styles: dict[str, ParallelStyle] = {name: style() for name, style in STYLES.items() if name in parts}
    return {**styles, **{name: ExpertParallel() for name, part in parts.items() if isinstance(part, Experts)}}


def _rows_of_experts(p: nn.Parameter) -> Optional[Shard]:
    return Shard(1) if p.ndim == 3 else None


def schedule_of(model: Transformer, mesh: DeviceMesh) -> Schedule1F1B:
    """Return the schedule that runs this stage, forward and backward, on the microbatches of a batch."""
    pipeline = mesh["pp"]
    stage = PipelineStage(
        model, pipeline.get_local_rank(), pipeline.size(), torch.device("cpu"), group=pipeline.get_group()
    )
    return Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)


def backward_through(schedule: Schedule1F1B, windows: Tensor, mesh: DeviceMesh) -> Tensor:
    """Set the gradients of the mean loss over windows (batch, CONTEXT + 1); return it on the last stage, else zero.

    A process takes its share of the batch by its place in `dp`; the loss is of that share.
    """
    share = windows.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    losses: list[Tensor] = []
    if mesh["pp"].get_local_rank() == 0:
        schedule.step(share[:, :-1].contiguous())  # torch 2.11 takes no other strides than those of the first call
    else:
        schedule.step(target=share[:, 1:], losses=losses)
    return torch.stack(losses).mean().detach() if losses else torch.zeros(())
