"""Second moments on ranks: bits of one process however matrices lie, and no more on the way than the moments."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.ranks.test_gram_sums import LONG, assert_close_to_alone
from tests.ranks.test_gram_sums import case_on as summed_case
from tests.ranks.test_messages import COUNT, case_on, count_steps
from tests.ranks.test_step import EXPERTS, WORK
from tests.ranks.test_teams import FOUR, TEAMS, long_ones, train_in_teams
from tests.support.backends import on_every_backend
from tests.support.pairwise import in_turn
from tests.support.rank_pool import device_of_ranks, one_by_one
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Layout,
    Spec,
    assert_as_alone,
    model,
    muon,
    one_thread,
    part_of,
    set_gradient_parts,
    wholes,
)
from tests.support.sharded_networks import assert_same_network, network_on, set_gradients

SIDES = ["rows", "long_side"]

pytestmark = [on_every_backend(), pytest.mark.parametrize("by", SIDES)]


@pytest.mark.parametrize("name, missing", in_turn(LAYOUTS, ["nowhere", "here and there", "all but one"]))
def test_every_layout_gives_the_bits_of_one_process(kernel, pools, name, missing, by):
    """Matrices with fewer rows or columns than ranks among them; in bfloat16 moments are longer than elements."""
    settings = {"second_moment": by, "second_moment_beta": 0.8, "ns_dtype": WORK[-1], "chunk_bytes": 700}
    case = Case(model(LAYOUTS[name], seed=21), settings, steps=6, dtype=torch.bfloat16, missing=missing)
    assert_as_alone(kernel, pools, case)


@pytest.mark.parametrize("dtype, work", [(torch.bfloat16, "float16"), (torch.float64, "float32")], ids=str)
@pytest.mark.parametrize("name", ["rows", "columns", "hsdp"])
def test_messages_of_two_dtypes_give_the_bits_of_one_process(kernel, pools, name, dtype, work, by):
    """On the way to the owner elements are wider than on the way back; moments are float32, and float64."""
    settings = {"second_moment": by, "ns_dtype": work, "ns_method": "standard", "chunk_bytes": 900}
    assert_as_alone(kernel, pools, Case(model(LAYOUTS[name], seed=23), settings, steps=3, dtype=dtype))


@pytest.mark.parametrize("layout", EXPERTS, ids=str)
def test_experts_give_the_bits_of_one_process(kernel, pools, layout, by):
    shapes = [("w1", (5, 12, 7)), ("w2", (5, 7, 12)), ("w3", (2, 1, 9))]
    specs = [Spec(f"layers.0.experts.{name}", shape, layout) for name, shape in shapes]
    specs.append(Spec("layers.1.experts.w1", (5, 7, 12), layout, {"transposed": True}))
    settings = {"second_moment": by, "chunk_bytes": 500}
    assert_as_alone(kernel, pools, Case(tuple(specs), settings, steps=5, missing="everywhere"))


@pytest.mark.parametrize("name, conv_mode", in_turn(LAYOUTS, ["flatten", "batched"]))
def test_convolutions_and_fused_rows_give_the_bits_of_one_process(kernel, pools, name, conv_mode, by):
    layout = LAYOUTS[name]
    specs = (
        Spec("a.conv.weight", (9, 5, 3, 3), layout),
        Spec("b.conv.weight", (3, 8, 5), layout),
        Spec("heads.weight", (48, 20), layout, {"split_rows": (6,) * 8, "second_moment": "rows"}),
        Spec("wqkv.weight", (22, 6), layout, {"split_rows": (10, 6, 6), "second_moment": by}),
        Spec("c_attn.weight", (6, 22), layout, {"split_rows": (10, 6, 6), "transposed": True, "second_moment": by}),
    )
    settings = {"conv_mode": conv_mode, "second_moment": by, "chunk_bytes": 700}
    assert_as_alone(kernel, pools, Case(specs, settings, steps=5, missing="everywhere"))


@pytest.mark.parametrize("layout", [None, LAYOUTS["replicated"], LAYOUTS["hsdp"]], ids=["plain", "replicated", "hsdp"])
def test_shared_large_copies_give_the_bits_of_one_process(kernel, pools, layout, by):
    """They are worth sending; the small one is not, and each copy does its own."""
    specs = tuple(Spec(f"layers.{i}.up.weight", (384, 400), layout) for i in range(2))
    specs += (Spec("layers.2.up.weight", (12, 20), layout),)
    case = Case(specs, {"ns_steps": 2, "second_moment": by}, steps=3, missing="everywhere", shared=layout is None)
    assert_as_alone(kernel, pools, case)


@pytest.mark.parametrize("name", LONG)
def test_sums_of_gram_matrices_make_way_for_owners(kernel, pools, name, by):
    """Of matrices that ranks would sum without second moments."""
    assert_as_alone(kernel, pools, summed_case(*LONG[name], settings={"second_moment": by}))


def test_teams_balance_whole_matrices(kernel, pools, by):
    settings = {**TEAMS, "second_moment": by}
    assert_close_to_alone(kernel, pools, Case(long_ones(FOUR), settings, steps=3), train_in_teams)


def test_zeros_and_a_nan_stay_where_they_are(kernel, pools, by):
    case = Case(model(LAYOUTS["rows and columns"], seed=22), {"second_moment": by}, steps=3, zero=(1,), spoiled=2)
    assert_as_alone(kernel, pools, case)


def moments_after_overflow(kernel, case: Case):
    """Return whether moments stay as they are in a step whose gradients overflow on one rank, and move in the next."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer, seen = muon(kernel, case, params), []
    for step in range(1, 4):
        set_gradient_parts(case, params, step)
        if step == 2:
            first = torch.distributed.get_rank() == 0
            optimizer.grad_scale = torch.ones((), device=params[0].device)
            optimizer.found_inf = torch.full((), float(first), device=params[0].device)
        optimizer.step()
        optimizer.grad_scale = optimizer.found_inf = None
        moments = [optimizer.state[p]["second_moment"] for p in params]
        seen.append([getattr(v, "_local_tensor", v).clone() for v in moments])
    unmoved = [bool(torch.equal(one, other)) for one, other in zip(seen[0], seen[1])]
    moved = [bool((one != other).all()) for one, other in zip(seen[1], seen[2])]
    return all(unmoved) and all(moved)


@pytest.mark.parametrize("name", ["rows", "columns", "hsdp", "replicated"])
def test_overflow_on_one_rank_leaves_all_moments_alone(pools, name, by):
    layout = LAYOUTS[name]
    specs = tuple(
        Spec(f"layers.{i}.up.weight", shape, layout) for i, shape in enumerate([(12, 20), (20, 12), (384, 400)])
    )
    assert all(pools(4).run(moments_after_overflow, Case(specs, {"second_moment": by, "ns_steps": 2})))


def shapes_of_moments(kernel, case: Case):
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    moments = [optimizer.state[p]["second_moment"] for p in params]
    assert all(isinstance(v, DTensor) and v.placements == p.placements for v, p in zip(moments, params))
    return [(tuple(v.shape), tuple(v.to_local().shape)) for v in moments]


# Of 12 x 20 on each rank, second moments of rows and of columns.
WHERE = {
    "rows": ([(3, 1)] * 4, [(1, 20), *[(0, 20)] * 3]),
    "columns": ([(12, 1), *[(12, 0)] * 3], [(1, 5)] * 4),
    "hsdp": ([(6, 1)] * 4, [(1, 20), (0, 20)] * 2),
    "rows and columns": ([(6, 1), (6, 0)] * 2, [(1, 10), (1, 10), (0, 10), (0, 10)]),
    "strided rows": ([(3, 1)] * 4, [(1, 20), *[(0, 20)] * 3]),
}


@pytest.mark.parametrize("name", WHERE)
def test_moments_lie_with_the_beginning_of_their_lines(pools, name, by):
    """So that each is there once in every copy, and in a checkpoint once."""
    case = Case((Spec("a.weight", (12, 20), LAYOUTS[name]),), {"second_moment": by})
    results = pools(4).run(shapes_of_moments, case)
    assert [local for ((_, local),) in results] == WHERE[name][by == "long_side"]
    assert {shape for ((shape, _),) in results} == {(12, 1) if by == "rows" else (1, 20)}


def test_no_more_is_sent_than_moments(pools, by):
    """In messages that are there anyway: of 32 x 64 in rows on four ranks, 24 moments to the owner and 24 back.

    Or, of columns, 64 that the first rank has, unless it is the owner: 32 x 64 are wide.
    """
    totals = []
    for settings in {}, {"second_moment": by}:
        results = pools(4).run(count_steps, case_on(LAYOUTS["rows"], **settings))
        assert all(
            [called for called, *_ in calls] == ["all_to_all_single"] * (2 * chunks) for calls, chunks in results
        )
        totals.append(sum(amount * itemsize for calls, _ in results for _, amount, itemsize in calls))
    # Each of the four ranks owns as many of the matrices.
    moments = COUNT * 2 * 24 if by == "rows" else COUNT * 3 // 4 * 2 * 64
    assert totals[1] - totals[0] == 4 * moments


@pytest.mark.parametrize("layout", [Layout((4,), ("0",)), Layout((2, 2), ("r", "0")), None], ids=str)
def test_copies_of_moments_agree(pools, layout, by):
    specs = (
        Spec("up.weight", (13, 9), layout),
        Spec("small.weight", (1, 9), layout),
        Spec("thin.weight", (9, 1), layout),
    )
    pools(4).run(checked_after_steps, Case(specs, {"second_moment": by}, shared=layout is None))


def checked_after_steps(kernel, case: Case) -> None:
    params = [part_of(case, i) for i in range(len(case.specs))]
    group = {"process_group": torch.distributed.group.WORLD} if case.shared else {}
    optimizer = muon(kernel, case, params, **group)
    for step in range(1, 3):
        set_gradient_parts(case, params, step)
        optimizer.step()
    optimizer.check_copies()


def step_of_parameters_elsewhere(kernel, by: str):
    """A matrix in parts on ranks 0 and 1, of which 2 and 3 have nothing."""
    mesh = torch.distributed.device_mesh.DeviceMesh(device_of_ranks(), [0, 1])
    p = torch.nn.Parameter(distribute_tensor(torch.ones(6, 9), mesh, [Shard(1)]))
    optimizer = kernel.Muon([("up.weight", p)], second_moment=by)
    p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state[p]["second_moment"].to_local().numel()


def test_ranks_without_a_part_have_no_moments(pools, by):
    assert pools(4).run(step_of_parameters_elsewhere, by) == ([6, 0, 0, 0] if by == "rows" else [5, 4, 0, 0])


def resumed_from_whole_state(kernel, by: str):
    """A state that is whole on every rank, loaded into a network with another layout: both go on alike."""
    networks = [network_on(name, device_of_ranks(), seed) for seed, name in enumerate(["tp and fsdp", "fsdp"])]
    optimizers = [kernel.Muon(network.named_parameters(), second_moment=by, lr=0.02) for network in networks]
    set_gradients(networks[0], 1)
    optimizers[0].step()
    options = StateDictOptions(full_state_dict=True)
    model, optim = get_state_dict(networks[0], optimizers[0], options=options)
    set_state_dict(networks[1], optimizers[1], model_state_dict=model, optim_state_dict=optim, options=options)
    for network, optimizer in zip(networks, optimizers):
        set_gradients(network, 2)
        optimizer.step()
    assert_same_network(*(wholes(dict(network.named_parameters())) for network in networks))


def test_whole_states_are_taken_into_shards(pools, by):
    pools(4).run(resumed_from_whole_state, by)


def step_after_meta(kernel, by):
    """Make the optimizer while its sharded matrix is on meta, then the matrix, and take a step; return the matrix."""
    mesh = DeviceMesh(device_of_ranks(), list(range(torch.distributed.get_world_size())))
    layer = torch.nn.Linear(12, 9, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(DTensor.from_local(torch.empty(3, 12, device="meta"), mesh, [Shard(0)]))
    optimizer = kernel.Muon(layer.named_parameters(), second_moment=by)
    layer.to_empty(device=device_of_ranks())
    torch.nn.init.ones_(layer.weight)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    return layer.weight.full_tensor().detach().cpu()


def test_an_optimizer_may_be_made_before_its_parameters_have_memory(kernel, pools, by):
    layer = torch.nn.Linear(12, 9, bias=False, device=pools.device)
    torch.nn.init.ones_(layer.weight)
    layer.weight.grad = torch.ones_like(layer.weight)
    with one_thread(), one_by_one(kernel):
        kernel.Muon(layer.named_parameters(), second_moment=by).step()
    for result in pools(3).run(step_after_meta, by):
        assert torch.equal(result, layer.weight.detach().cpu())
