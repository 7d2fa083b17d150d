"""Parameters that are trained in several processes, each with a layout of its own, and as wholes in one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.inside import muon_settings
from tests.support.pieces import Pieces, Trained, mesh_of, piece_of, put_together
from tests.support.rank_pool import device_of_ranks, one_by_one
from tests.support.small_model import set_gradient


class Layout(NamedTuple):
    """A mesh, and what each of its dimensions does: `r` replicates, `1` shards dimension 1, `0/2` cuts it in 2 first"""

    mesh: tuple[int, ...]
    splits: tuple[str, ...]

    def placements(self) -> list[Any]:
        return [_placement(split) for split in self.splits]


class Spec(NamedTuple):
    """A parameter; `group` are settings of a group of its own."""

    name: str
    shape: tuple[int, ...]
    layout: Layout | None = None
    group: Mapping[str, Any] = {}


class Case(NamedTuple):
    """A training run on random gradients; `missing` says which are None, `settings` are Muon's."""

    specs: tuple[Spec, ...]
    settings: Mapping[str, Any] = {}
    # The fewest in which gradients that are missing "here and there" follow each other in every way.
    steps: int = 12
    seed: int = 0
    dtype: torch.dtype = torch.float32
    missing: str = "nowhere"
    zero: tuple[int, ...] = ()  # parameters whose gradients are all zero
    spoiled: int | None = None  # a parameter with one NaN in its first gradient
    shared: bool = False  # plain parameters are copies, and their work is split: process_group=
    gradient_dtype: torch.dtype | None = None  # if it is not the parameters'


# By name, for 4 ranks. FSDP2 is `rows`, with tensor parallelism `strided rows` or `rows and columns`.
LAYOUTS = {
    "replicated": Layout((4,), ("r",)),
    "rows": Layout((4,), ("0",)),
    "columns": Layout((4,), ("1",)),
    "hsdp": Layout((2, 2), ("r", "0")),
    "replicated within": Layout((2, 2), ("1", "r")),
    "rows and columns": Layout((2, 2), ("0", "1")),
    "columns and rows": Layout((2, 2), ("1", "0")),
    "rows twice": Layout((2, 2), ("0", "0")),
    "strided rows": Layout((2, 2), ("0/2", "0")),
    "strided columns": Layout((2, 2), ("1/2", "1")),
}


def model(layout: Layout | None, seed: int) -> tuple[Spec, ...]:
    """Return matrices of random sizes, some with fewer rows or columns than ranks."""
    draw = random.Random(seed)
    sizes = [(draw.randint(1, 40), draw.randint(1, 40)) for _ in range(8)]
    sizes += [(draw.randint(1, 3), draw.randint(8, 30)), (draw.randint(8, 30), draw.randint(1, 3))]
    return tuple(Spec(f"layers.{i}.up.weight", size, layout) for i, size in enumerate(sizes))


def train(kernel, case: Case) -> Pieces:
    """The job of every rank: train its parts. `put_together` makes wholes of what all ranks return."""
    params, optimizer = built(kernel, case)
    take_steps(case, params, optimizer, range(1, case.steps + 1))
    return pieces_of(case, params, optimizer)


def built(kernel, case: Case):
    """Return what this rank has of the parameters, and their optimizer."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    return params, muon(kernel, case, params, **({"process_group": dist.group.WORLD} if case.shared else {}))


def take_steps(case: Case, params: Sequence[Tensor], optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        for i, (spec, p) in enumerate(zip(case.specs, params)):
            missing = is_missing(case, step, i, holder_of(spec.layout))
            set_gradient(p, None if missing else sharded(whole_gradient(case, step, i), spec.layout).data)
        optimizer.step()


def pieces_of(case: Case, params: Sequence[Tensor], optimizer) -> Pieces:
    state = [{key: piece_of(value) for key, value in optimizer.state[p].items()} for p in params]
    return Pieces(list(map(piece_of, params)), state, [piece_of(_holders(spec)) for spec in case.specs])


def train_alone(kernel, case: Case, holders: Sequence[Tensor], device: str = "cpu") -> Trained:
    """Train wholes in this process, with zeros for what holders have no gradient of while others have."""
    with one_thread(), one_by_one(kernel):
        return _train_alone(kernel, case, holders, device)


@contextlib.contextmanager
def one_thread():
    """Work with one thread, as the processes do: with more a product may sum in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train_alone(kernel, case: Case, holders: Sequence[Tensor], device: str) -> Trained:
    params = [torch.nn.Parameter(whole_parameter(case, i).to(device)) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    for step in range(1, case.steps + 1):
        for i, p in enumerate(params):
            absent = torch.zeros_like(holders[i], dtype=torch.bool)
            for holder in holders[i].unique().tolist():
                absent |= (holders[i] == holder) & is_missing(case, step, i, holder)
            set_gradient(p, None if absent.all() else whole_gradient(case, step, i).masked_fill(absent, 0.0).to(device))
        optimizer.step()
    return Trained([whole(p) for p in params], [wholes(optimizer.state[p]) for p in params], list(holders))


def assert_as_alone(kernel, pools, case: Case, ranks: int = 4) -> None:
    """Parameters and state have, on each of the ranks, the bits that they have in one process."""
    results = put_together(pools(ranks).run(train, case))
    alone = train_alone(kernel, case, results[0].holders, pools.device)
    for result in results:
        assert_same(case, result, alone)


def assert_same(case: Case, one: Trained, other: Trained) -> None:
    """Parameters and state have the same bits."""
    columns = case.specs, one.parameters, other.parameters, one.state, other.state
    for spec, p, q, state, other_state in zip(*columns, strict=True):
        assert bits_equal(p, q), f"{spec} differs by up to {(p.double() - q.double()).abs().max():.3g}"
        assert state.keys() == other_state.keys()
        wrong = [key for key in state if not bits_equal(state[key], other_state[key])]
        assert not wrong, f"{wrong} of {spec}"


def bits_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits, those of NaNs included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other)))


def muon(kernel, case: Case, params: Sequence[Tensor], **settings):
    """Return an optimizer for `params`, in which thin matrices, too, are Muon's."""
    return kernel.Muon(
        groups_of(case, params),
        is_muon=lambda name, p: (p.ndim > 1 and "embeddings" not in name) or None,
        **muon_settings(kernel, {**case.settings, **settings}),
    )


def groups_of(case: Case, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return parameter groups: one for all, and one for each that has settings of its own."""
    named = [(spec, (spec.name, p)) for spec, p in zip(case.specs, params)]
    common = [pair for spec, pair in named if not spec.group]
    groups = [{"params": [pair], **spec.group} for spec, pair in named if spec.group]
    return [{"params": common}, *groups] if common else groups


def whole_parameter(case: Case, number: int) -> Tensor:
    """Return the first value of a parameter."""
    return _random(case, 0, number, case.dtype)


def part_of(case: Case, number: int) -> torch.nn.Parameter:
    """Return what this rank has of a parameter's first value."""
    return sharded(whole_parameter(case, number), case.specs[number].layout)


def whole_gradient(case: Case, step: int, number: int) -> Tensor:
    """Return a gradient as one process has it."""
    gradient = _random(case, step, number, case.gradient_dtype or case.dtype)
    if number in case.zero:
        gradient.zero_()
    if number == case.spoiled and step == 1:
        gradient.view(-1)[-1] = float("nan")
    return gradient


def set_gradient_parts(case: Case, params: Sequence[Tensor], step: int) -> None:
    """Let each parameter have this rank's part of its gradient in a step, whichever are missing in the case."""
    for i, (spec, p) in enumerate(zip(case.specs, params)):
        p.grad = sharded(whole_gradient(case, step, i), spec.layout).data


def is_missing(case: Case, step: int, number: int, holder: int) -> bool:
    """Whether this holder has no gradient of this parameter in this step."""
    where = {
        "nowhere": False,
        "everywhere": (step + number) % 3 == 0,
        "here and there": (step + number + holder) % 3 == 0 or (step + number) % 5 == 0,
        "always": True,
        "all but one": holder != (step + number) % 4,
    }
    return where[case.missing]


def holder_of(layout: Layout | None) -> int:
    """Return this rank's number among those that hold different parts; copies have one number."""
    if layout is None:
        return 0
    holder = 0
    for size, split, index in zip(layout.mesh, layout.splits, mesh_of(layout.mesh).get_coordinate()):
        holder = holder if split == "r" else holder * size + index
    return holder


def whole(value: Tensor) -> Tensor:
    """Return a tensor with all of its parts, on every rank, in memory of its own on the CPU."""
    value = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    return value.clone(memory_format=torch.contiguous_format).cpu()


def wholes(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: whole(value) for key, value in values.items()}


def _random(case: Case, step: int, number: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * case.seed + 1009 * step + number)
    return torch.randn(case.specs[number].shape, generator=generator).to(dtype)


def _holders(spec: Spec) -> Tensor:
    value = sharded(torch.zeros(spec.shape), spec.layout).data
    (value._local_tensor if isinstance(value, DTensor) else value).fill_(holder_of(spec.layout))
    return value


def sharded(value: Tensor, layout: Layout | None) -> torch.nn.Parameter:
    """Return this rank's part of `value`, which every rank has, where its tensors are; nothing is sent."""
    value = value.to(device_of_ranks())
    if layout is not None:
        value = distribute_tensor(value, mesh_of(layout.mesh), layout.placements(), src_data_rank=None)
    return torch.nn.Parameter(value)


def _placement(split: str) -> Any:
    if split == "r":
        return Replicate()
    dim, _, factor = split.partition("/")
    return _StridedShard(int(dim), split_factor=int(factor)) if factor else Shard(int(dim))
