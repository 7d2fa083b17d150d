"""Sharded parameters without gradients, with gradients of zero or NaN, their state, and layouts that raise."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from sharded_models import (
    LAYOUTS,
    Case,
    Spec,
    assert_as_alone,
    assert_same,
    bits_equal,
    mesh_of,
    model,
    part_of,
    train,
    train_alone,
    whole_parameter,
)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_that_are_none_everywhere_leave_everything_alone(pools, layout):
    case = Case(model(layout, seed=5), missing="always", steps=2)
    for result in pools(4).run(train, case):
        for i, (p, state) in enumerate(zip(result.parameters, result.state)):
            assert bits_equal(p, whole_parameter(case, i))
            assert not state["momentum_buffer"].any()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_zero_are_only_decay(kernel, pools, layout):
    case = Case(model(layout, seed=6), {"lr": 0.1, "weight_decay": 0.5}, zero=(0, 2, 3), steps=1)
    assert_as_alone(kernel, pools, case)
    for result in pools(4).run(train, case):
        # 1 - lr * decay, rounded, and the product once more.
        torch.testing.assert_close(result.parameters[2], 0.95 * whole_parameter(case, 2), rtol=2**-22, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_nan_in_one_shard_reaches_its_own_matrix_on_all_ranks_and_no_other(kernel, pools, layout):
    specs = tuple(Spec(f"layers.{i}.up.weight", (12, 8 + i % 2), layout) for i in range(6))
    sound = Case(specs, {"chunk_bytes": 600}, steps=2)
    expected = train_alone(kernel, sound, [torch.zeros(spec.shape) for spec in specs])
    for result in pools(4).run(train, sound._replace(spoiled=3)):
        assert result.parameters[3].isnan().all()
        for i in (0, 1, 2, 4, 5):
            assert bits_equal(result.parameters[i], expected.parameters[i])


def train_amid_churn(kernel, case: Case):
    """Train while another thread takes memory, fills it with NaN and gives it back, and ranks are late at random."""
    done = threading.Event()
    draw = random.Random(dist.get_rank())

    def churn():
        while not done.is_set():
            [torch.empty(draw.randint(1, 5000)).fill_(float("nan")) for _ in range(20)]
            time.sleep(draw.choice([0.0, 0.0, 0.001]))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        return train(kernel, case)
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [2, 5])
def test_memory_that_is_reused_meanwhile_tears_no_message_in_two_thousand_steps(kernel, pools, in_flight):
    layouts = ["rows", "hsdp", "columns and rows", "rows", "strided rows", "columns"] * 2
    specs = tuple(Spec(f"layers.{i}.up.weight", (9 + i, 14), LAYOUTS[name]) for i, name in enumerate(layouts))
    case = Case(specs, {"chunk_bytes": 1, "chunks_in_flight": in_flight, "lr": 1e-3}, steps=1000)
    results = pools(4).run(train_amid_churn, case, seconds=400)
    alone = train_alone(kernel, case, results[0].holders)
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


def test_state_is_there_from_the_start_and_lies_as_its_parameter(pools):
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


def test_values_that_are_yet_to_be_summed_raise(pools):
    for text in pools(2).run(raised_for, "up.weight", (8, 8), [Partial()], {}):
        assert "up.weight" in text
        assert "Partial" in text


@pytest.mark.parametrize("conv_mode", ["flatten", "batched"])
def test_a_convolution_sharded_along_its_kernel_raises(pools, conv_mode):
    for text in pools(2).run(raised_for, "a.weight", (8, 8, 2, 3), [Shard(2)], {"conv_mode": conv_mode}):
        assert "a.weight" in text
        assert "[2]" in text


def _lies_as(value, p) -> bool:
    same = value.placements == p.placements and value.device_mesh == p.device_mesh
    return same and value._local_tensor.shape == p._local_tensor.shape
