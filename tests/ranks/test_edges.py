"""Sharded parameters without gradients, with gradients of zero or NaN, their state, and layouts that raise."""

from __future__ import annotations

import math
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support.backends import on_every_backend
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Spec,
    assert_as_alone,
    assert_same,
    bits_equal,
    mesh_of,
    model,
    muon,
    one_thread,
    part_of,
    sharded,
    train,
    train_alone,
    whole,
    whole_gradient,
    whole_parameter,
)


@on_every_backend()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_missing_gradients_on_all_ranks_change_nothing(pools, layout):
    case = Case(model(layout, seed=5), missing="always", steps=2)
    for result in pools(4).run(train, case):
        for i, (p, state) in enumerate(zip(result.parameters, result.state)):
            assert bits_equal(p, whole_parameter(case, i))
            assert not state["momentum_buffer"].any()


@on_every_backend()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_zero_gradients_apply_only_weight_decay(kernel, pools, layout):
    case = Case(model(layout, seed=6), {"lr": 0.1, "weight_decay": 0.5}, zero=(0, 2, 3), steps=1)
    assert_as_alone(kernel, pools, case)
    for result in pools(4).run(train, case):
        # 1 - lr * decay, rounded, and the product once more.
        torch.testing.assert_close(result.parameters[2], 0.95 * whole_parameter(case, 2), rtol=2**-22, atol=0)


@on_every_backend()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_nan_in_one_shard_stays_in_its_matrix(kernel, pools, layout):
    """All of that matrix is NaN then, on all ranks."""
    specs = tuple(Spec(f"layers.{i}.up.weight", (12, 8 + i % 2), layout) for i in range(6))
    sound = Case(specs, {"chunk_bytes": 600}, steps=2)
    expected = train_alone(kernel, sound, [torch.zeros(spec.shape) for spec in specs], pools.device)
    for result in pools(4).run(train, sound._replace(spoiled=3)):
        assert result.parameters[3].isnan().all()
        for i in (0, 1, 2, 4, 5):
            assert bits_equal(result.parameters[i], expected.parameters[i])


def train_amid_churn(kernel, case: Case):
    """Train while another thread takes memory, fills it with NaN and gives it back, and ranks are late at random."""
    done = threading.Event()
    draw = random.Random(dist.get_rank())
    # A thread has a current device of its own.
    device = torch.empty(0, device=device_of_ranks()).device

    def churn():
        while not done.is_set():
            [torch.empty(draw.randint(1, 5000), device=device).fill_(float("nan")) for _ in range(20)]
            time.sleep(draw.choice([0.0, 0.0, 0.001]))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        return train(kernel, case)
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
@on_every_backend()
@pytest.mark.parametrize("in_flight", [1, 2, 3, 5])  # 500 steps each, 2,000 in all
def test_memory_churn_corrupts_no_message(kernel, pools, in_flight):
    layouts = ["rows", "hsdp", "columns and rows", "rows", "strided rows", "columns"] * 2
    specs = tuple(Spec(f"layers.{i}.up.weight", (9 + i, 14), LAYOUTS[name]) for i, name in enumerate(layouts))
    case = Case(specs, {"chunk_bytes": 1, "chunks_in_flight": in_flight, "lr": 1e-3}, steps=500)
    results = pools(4).run(train_amid_churn, case, seconds=400)
    alone = train_alone(kernel, case, results[0].holders, pools.device)
    for result in results:
        assert_same(case, result, alone)


def layouts_of_state(kernel, case: Case):
    """Return whether the state of each parameter lies as it does, before a step and after it."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = kernel.Muon([(spec.name, p) for spec, p in zip(case.specs, params)])
    found = []
    for _ in range(2):
        for p in params:
            tensors = [value for key, value in optimizer.state[p].items() if key != "step"]
            found += [_lies_as(value, p) for value in tensors]
            p.grad = torch.ones_like(p)
        optimizer.step()
    return found


def test_state_exists_from_the_start_and_is_sharded_alike(pools):
    layouts = list(LAYOUTS.values())
    specs = tuple(Spec(f"layers.{i}.up.weight", (13, 22), layout) for i, layout in enumerate(layouts))
    specs += tuple(Spec(f"layers.{i}.up.bias", (13,), LAYOUTS[name]) for i, name in enumerate(("rows", "hsdp")))
    for found in pools(4).run(layouts_of_state, Case(specs)):
        assert len(found) == 2 * (len(layouts) + 2 * 2)
        assert all(found)


def raised_for(kernel, name, shape, placements, settings):
    local = torch.zeros(shape)
    p = nn.Parameter(DTensor.from_local(local, mesh_of((2,)), placements, run_check=False))
    try:
        kernel.Muon([(name, p)], **settings)
    except ValueError as error:
        return str(error)


def test_partial_parameters_raise(pools):
    for text in pools(2).run(raised_for, "up.weight", (8, 8), [Partial()], {}):
        assert "up.weight" in text
        assert "Partial" in text


@pytest.mark.parametrize("conv_mode", ["flatten", "batched"])
def test_convolution_sharded_along_its_kernel_raises(pools, conv_mode):
    for text in pools(2).run(raised_for, "a.weight", (8, 8, 2, 3), [Shard(2)], {"conv_mode": conv_mode}):
        assert "a.weight" in text
        assert "[2]" in text


def step_with_gradient(kernel, placements):
    """Return the error of a step whose gradient has these placements, and whether the parameter moved."""
    p = nn.Parameter(DTensor.from_local(torch.ones(4, 6), mesh_of((2,)), [Shard(0)], run_check=False))
    before = p.to_local().clone()
    optimizer = kernel.Muon([("up.weight", p)])
    local = torch.ones(4, 6) if placements == [Shard(0)] else torch.ones(8, 6 if placements != [Shard(1)] else 3)
    gradient = DTensor.from_local(local, mesh_of((2,)), placements, run_check=False)
    object.__setattr__(p, "grad", None)
    p.grad = gradient
    try:
        optimizer.step()
    except ValueError as error:
        return str(error), torch.equal(p.to_local(), before)


@pytest.mark.parametrize("placements", [[Partial()], [Shard(1)], [Replicate()]], ids=str)
def test_gradient_with_other_placements_raises(pools, placements):
    """It raises before anything moves."""
    for text, unmoved in pools(2).run(step_with_gradient, placements):
        assert str(placements[0]).split("(")[0] in text and "redistribute" in text
        assert unmoved


def metrics_of_step(kernel, case: Case, part=sharded):
    params = [part(whole_parameter(case, i), spec.layout) for i, spec in enumerate(case.specs)]
    optimizer = muon(kernel, case, params)
    for i, (spec, p) in enumerate(zip(case.specs, params)):
        p.grad = part(whole_gradient(case, 1, i), spec.layout).data
    optimizer.step()
    return {name: value.item() for name, value in optimizer.metrics().items()}


@pytest.mark.parametrize("spoiled", [None, 1])
@pytest.mark.parametrize("name", ["rows", "columns", "rows and columns", "strided rows"])
def test_metrics_of_ranks_add_up_to_those_of_one_process(kernel, pools, name, spoiled):
    layout = LAYOUTS[name]
    sizes = [(13, 7), (9, 30), (22, 22)]
    specs = tuple(Spec(f"layers.{i}.up.weight", size, layout) for i, size in enumerate(sizes))
    case = Case((*specs, Spec("tok_embeddings.weight", (30, 14), layout)), {"chunk_bytes": 400}, spoiled=spoiled)
    found = pools(4).run(metrics_of_step, case)
    with one_thread():
        alone = metrics_of_step(kernel, case, lambda value, layout: nn.Parameter(value))
    for key in ("matrices", "matrices_not_finite"):
        assert sum(own[key] for own in found) == alone[key]
    for key in ("fallback_update_norm", "muon_update_norm"):
        # In two orders of summation, of float32 norms; NaN where the whole is.
        assert sum(own[key] ** 2 for own in found) ** 0.5 == pytest.approx(alone[key], rel=1e-6, nan_ok=True)
    assert all(math.isfinite(own["muon_update_norm"]) for own in found if not own["matrices_not_finite"])


@pytest.mark.parametrize("key", ["chunk_bytes", "chunks_in_flight"])
@pytest.mark.parametrize("value, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_impossible_chunk_settings_raise(kernel, key, value, error):
    with pytest.raises(error, match=f"{key} must be .*{value}"):
        kernel.Muon([nn.Parameter(torch.ones(4, 4))], **{key: value})


def error_of_unsorted_group(kernel):
    group = dist.new_group([1, 0], sort_ranks=False)
    with pytest.raises(ValueError, match="rising order"):
        kernel.Muon([nn.Parameter(torch.ones(4, 4))], process_group=group)


def test_process_group_in_another_order_raises(pools):
    pools(2).run(error_of_unsorted_group)


def steps_on_two_meshes(kernel, seed: int):
    """Some parameters lie on all ranks, some on two of them; ranks have them in one order or the other."""
    pairs, every = mesh_of((2, 2))["y"], mesh_of((4,))
    params = [nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])) for mesh in (pairs, every)]
    named = [("a.weight", params[0]), ("b.weight", params[1])]
    optimizer = kernel.Muon(named if dist.get_rank() < 2 else named[::-1], lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return all(not bits_equal(whole(p), torch.ones(8, 8)) for p in params)


def test_ranks_meet_in_two_exchanges_in_one_order(pools):
    assert pools(4).run(steps_on_two_meshes, 0) == [True] * 4


def _lies_as(value, p) -> bool:
    same = value.placements == p.placements and value.device_mesh == p.device_mesh
    return same and value._local_tensor.shape == p._local_tensor.shape
