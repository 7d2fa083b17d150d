"""QK-clip where weights lie on several ranks: what any rank observed counts, and rows are scaled as in one process."""

import math
import warnings
from typing import NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.backends import on_every_backend
from tests.support.pairwise import in_turn
from tests.support.pieces import mesh_of
from tests.support.rank_pool import device_of_ranks, one_by_one
from tests.support.sharded_models import LAYOUTS, bits_equal, one_thread, whole

HEAD, HEADS, WIDTH = 4, 6, 20
FIRST = HEAD * HEADS // 4  # rows on rank 0 if four ranks share them
WEIGHTS = ("attn.q_proj.weight", "attn.k_proj.weight")
CLIP = {"threshold": 10.0, "head_dim": HEAD}
HALVES = {"master_weights": "split", "momentum_dtype": "float32"}


class Second(NamedTuple):
    """The second of two steps; and of both whether weights are the upper halves of float32 ones.

    If the first one overflows, only that observes logits. GradScaler does not call it in one process.
    """

    is_missing: bool  # the gradient
    overflows: bool
    halves: bool = False
    after_overflow: bool = False
    is_partial: bool = False  # only rank 0 has its part of the gradient, `FIRST` rows


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def logits(rank):
    """The largest logits that a rank has seen, -inf for heads that others have, as under tensor parallelism."""
    seen = torch.full((HEADS,), -math.inf)
    seen[rank % HEADS] = 15.0 + 10 * rank
    return seen


def steps_of(kernel, layout, device, seen, second):
    """Return the whole float32 weights after a step with a gradient and the second one."""
    dtype, settings = (torch.bfloat16, HALVES) if second.halves else (torch.float32, {})
    params = {name: draw(HEADS * HEAD, WIDTH, seed=i).to(device, dtype) for i, name in enumerate(WEIGHTS)}
    if layout is not None:
        mesh = mesh_of(layout.mesh)
        params = {n: distribute_tensor(p, mesh, layout.placements(), src_data_rank=None) for n, p in params.items()}
    params = {name: torch.nn.Parameter(p) for name, p in params.items()}
    optimizer = kernel.Muon(params.items(), lr=0.02, ns_dtype="float32", qk_clip=CLIP, **settings)
    for step in range(2):
        for i, p in enumerate(params.values()):
            gradient = draw(HEADS * HEAD, WIDTH, seed=10 * step + i + 2).to(device, dtype)
            if step and second.is_partial:
                gradient[FIRST:] = 0
            if isinstance(p, DTensor):
                gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            is_elsewhere = second.is_partial and isinstance(p, DTensor) and torch.distributed.get_rank() > 0
            p.grad = None if step and (second.is_missing or is_elsewhere) else gradient
        if second.overflows or second.after_overflow:
            optimizer.found_inf = torch.tensor(float(step == second.overflows), device=device)
        if not (second.after_overflow and step):
            optimizer.observe_qk_logits("attn", seen.to(device))
        if not (second.after_overflow and layout is None and not step):
            optimizer.step()
    return [whole(p) for p in (optimizer.master_weights() if second.halves else params).values()]


def clipped_on_ranks(kernel, layout, second):
    return steps_of(kernel, layout, device_of_ranks(), logits(torch.distributed.get_rank()), second)


def assert_as_in_one_process(kernel, pools, layout, second):
    """That process has seen the logits of all ranks, and has clipped some heads."""
    together = torch.stack([logits(rank) for rank in range(4)]).amax(0)
    with one_thread(), one_by_one(kernel):
        expected = steps_of(kernel, None, pools.device, together, second)
        blind = steps_of(kernel, None, pools.device, torch.ones(HEADS), second)
    assert not any(map(bits_equal, expected, blind))
    for result in pools(4).run(clipped_on_ranks, layout, second):
        assert all(map(bits_equal, result, expected))


@on_every_backend()
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("name, missing", in_turn(LAYOUTS, [False, True]))
def test_rows_are_scaled_as_in_one_process(kernel, pools, name, missing, overflow):
    assert_as_in_one_process(kernel, pools, LAYOUTS[name], Second(missing, overflow))


@on_every_backend()
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_a_step_observed_that_overflow_skips_is_clipped_by_the_next_one(kernel, pools, layout, missing):
    assert_as_in_one_process(kernel, pools, layout, Second(missing, overflows=False, after_overflow=True))


@on_every_backend()
@pytest.mark.parametrize("overflow", [False, True])
def test_rows_without_a_gradient_are_scaled_once_if_other_ranks_have_one(kernel, pools, overflow):
    assert_as_in_one_process(kernel, pools, LAYOUTS["rows"], Second(False, overflow, is_partial=True))


@on_every_backend()
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_of_halves_are_scaled_in_float32(kernel, pools, layout, overflow):
    """Also those of weights without a gradient, which a step over ranks scales by itself."""
    together, second = torch.stack([logits(rank) for rank in range(4)]).amax(0), Second(True, overflow, halves=True)
    with one_thread(), one_by_one(kernel):
        expected = steps_of(kernel, None, pools.device, together, second)
    assert not any(torch.equal(weight, weight.bfloat16().float()) for weight in expected)
    for result in pools(4).run(clipped_on_ranks, layout, second):
        assert all(map(bits_equal, result, expected))


def step_of_heads_of_three_rows(kernel, layout, device):
    """Return whole weights and biases, of nine rows, after a step in which the first and the last head are clipped."""
    params = {}
    for i, name in enumerate((*WEIGHTS, *(name.replace("weight", "bias") for name in WEIGHTS))):
        value = draw(9, *[WIDTH] * name.endswith("weight"), seed=i).to(device)
        if layout is not None:
            value = distribute_tensor(value, mesh_of(layout.mesh), layout.placements(), src_data_rank=None)
        params[name] = torch.nn.Parameter(value)
    optimizer = kernel.Muon(params.items(), lr=0.02, ns_dtype="float32", qk_clip={"threshold": 10.0, "head_dim": 3})
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.observe_qk_logits("attn", torch.tensor([20.0, 5.0, 40.0], device=device))
    optimizer.step()
    return list(map(whole, params.values()))


def step_of_heads_on_ranks(kernel, layout):
    return step_of_heads_of_three_rows(kernel, layout, device_of_ranks())


@on_every_backend()
def test_a_rank_without_rows_scales_none(kernel, pools):
    """Of nine rows on four ranks the last one has none."""
    with one_thread(), one_by_one(kernel):
        expected = step_of_heads_of_three_rows(kernel, None, pools.device)
    for result in pools(4).run(step_of_heads_on_ranks, LAYOUTS["rows"]):
        assert all(map(bits_equal, result, expected))


def steps_beside_weights_of_others(kernel, steps: int = 2):
    """Take steps with queries and keys that the first two ranks share, and a matrix of this rank; return that."""
    mesh = DeviceMesh(device_of_ranks(), [0, 1])
    values = {name: draw(HEADS * HEAD, WIDTH, seed=i) for i, name in enumerate(WEIGHTS)}
    params = {name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) for name, value in values.items()}
    params = {name: torch.nn.Parameter(p) for name, p in {**params, "mlp.up.weight": draw(9, 7, seed=5)}.items()}
    optimizer = kernel.Muon(params.items(), lr=0.02, ns_dtype="float32", qk_clip=CLIP)
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return params["mlp.up.weight"].detach()


def warnings_of_missing_logits(kernel) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps_beside_weights_of_others(kernel, steps=10)
    return [line for line in (str(warning.message) for warning in caught) if "no attention logits" in line]


def test_only_ranks_that_have_attentions_are_warned_that_no_logits_were_observed(pools):
    assert list(map(len, pools(4).run(warnings_of_missing_logits))) == [1, 1, 0, 0]


def warnings_of_replicas(kernel, shared: bool) -> list[str]:
    params = [(name, torch.nn.Parameter(draw(HEADS * HEAD, WIDTH, seed=0))) for name in WEIGHTS]
    exchange = kernel.ExchangeOptions(process_group=torch.distributed.group.WORLD) if shared else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = kernel.Muon(params, qk_clip=CLIP, exchange=exchange)
        optimizer.add_param_group({"params": [("mlp.up.weight", torch.nn.Parameter(draw(9, 7, seed=5)))]})
    return [str(warning.message) for warning in caught]


def test_replicas_whose_logits_nobody_compares_are_warned_of(pools):
    """As under DistributedDataParallel: each rank would scale its copy by the logits of its own batch. It is said once,
    though later groups make other plans.
    """
    for said in pools(2).run(warnings_of_replicas, False):
        assert sum("qk_clip sees the attention logits of rank" in line for line in said) == 1
    assert pools(2).run(warnings_of_replicas, True) == [[], []]


def error_of_weights_on_unlike_ranks(kernel) -> str:
    """All ranks share the queries, and two of them the keys."""
    meshes = mesh_of((4,)), mesh_of((2, 2))["x"]
    values = [distribute_tensor(draw(HEADS * HEAD, WIDTH, seed=0), mesh, [Shard(0)]) for mesh in meshes]
    with pytest.raises(ValueError) as caught:
        kernel.Muon(zip(WEIGHTS, map(torch.nn.Parameter, values)), qk_clip=CLIP)
    return str(caught.value)


def test_weights_on_unlike_ranks_are_refused(pools):
    """Logits are compared once, by the ranks that share all of the weights."""
    for rank, error in enumerate(pools(4).run(error_of_weights_on_unlike_ranks)):
        others = (rank % 2, rank % 2 + 2)
        assert f"queries and keys are on 2 groups of ranks, [(0, 1, 2, 3), {others}]" in error


def test_ranks_without_the_weights_clip_nothing(pools):
    first, *others = pools(4).run(steps_beside_weights_of_others)
    assert all(torch.equal(first, other) for other in others)


def heads_not_finite(kernel, broken) -> int:
    """The number that a rank reports, if rank 1 has observed `broken` as the logit of a head."""
    mesh, rank = mesh_of((2,)), torch.distributed.get_rank()
    weights = [
        distribute_tensor(draw(HEADS * HEAD, WIDTH, seed=i), mesh, [Shard(0)], src_data_rank=None) for i in (0, 1)
    ]
    params = {name: torch.nn.Parameter(weight) for name, weight in zip(WEIGHTS, weights)}
    optimizer = kernel.Muon(params.items(), lr=0.02, qk_clip=CLIP)
    for p in params.values():
        p.grad = torch.ones_like(p)
    seen = torch.ones(HEADS)
    seen[2] = broken if rank == 1 else 1.0
    optimizer.observe_qk_logits("attn", seen)
    optimizer.step()
    return int(optimizer.metrics()["heads_not_finite"])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_all_ranks_count_a_head_that_is_not_finite_on_one(pools, broken):
    assert pools(2).run(heads_not_finite, broken) == [1, 1]


def first_column_after_sharded_logits(kernel):
    """Give logits in a DTensor to the Motif kernel's Muon; return the first column of the query weight."""
    weights = {name: torch.nn.Parameter(torch.ones(8, 4, device=device_of_ranks())) for name in WEIGHTS}
    names = [f"layers.3.{name}" for name in WEIGHTS]
    clip = {"q_indices": [0, 1], "k_indices": [0, 1], "head_dim": HEAD, "threshold": 10.0}
    group = {"params": list(weights.values()), "names": names, "use_muon": True}
    optimizer = kernel.compat.Muon([group], clip_config=clip)
    seen = distribute_tensor(torch.tensor([5.0, 40.0], device=device_of_ranks()), mesh_of((2,)), [Shard(0)])
    optimizer.step(qk_logits={3: seen})
    return weights[WEIGHTS[0]][:, 0].tolist()


def test_logits_in_a_dtensor_clip_all_heads_by_the_motif_kernels_names(pools):
    assert pools(2).run(first_column_after_sharded_logits) == [[1.0] * 4 + [0.5] * 4] * 2
