"""A real GradScaler over shards: gradients that overflow on one rank are no step on any, and the scale backs off."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.backends import on_every_backend, read_last_step
from tests.support.rank_pool import device_of_ranks, one_by_one
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Spec,
    bits_equal,
    model,
    muon,
    one_thread,
    part_of,
    sharded,
    whole,
    whole_gradient,
    whole_parameter,
    wholes,
)

SCALE = 2.0**10
NAMES = ["rows", "columns", "hsdp", "rows and columns", "strided rows"]

pytestmark = on_every_backend()


def case_on(name: str) -> Case:
    layout = LAYOUTS[name]
    specs = (Spec("first.weight", (24, 20), layout), *model(layout, seed=9), Spec("embeddings.w", (30, 14), layout))
    return Case(specs, {"chunk_bytes": 1000, "lr": 0.02}, steps=3)


def train_scaled(kernel, case: Case, spoiled: tuple[int, ...]):
    """Gradients of the `spoiled` ranks overflow at the second step; returns wholes, state and scale after each."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    assert optimizer._step_supports_amp_scaling  # else a rank that skips would leave the others waiting
    scaler = torch.amp.GradScaler(device_of_ranks(), init_scale=SCALE)
    scaler.scale(torch.zeros((), device=device_of_ranks()))
    history = []
    for step in range(1, case.steps + 1):
        for i, (spec, p) in enumerate(zip(case.specs, params)):
            p.grad = sharded(whole_gradient(case, step, i) * scaler.get_scale(), spec.layout).data
        if step == 2 and dist.get_rank() in spoiled:
            params[0].grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        state = [wholes(optimizer.state[p]) for p in params]
        history.append(([whole(p) for p in params], state, scaler.get_scale()))
    read_last_step(optimizer)
    return history


def train_unscaled(kernel, case: Case, steps, device: str):
    """Return whole parameters after these steps of one process without a scaler."""
    params = [nn.Parameter(whole_parameter(case, i).to(device)) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    with one_thread(), one_by_one(kernel):
        for step in steps:
            for i, p in enumerate(params):
                p.grad = whole_gradient(case, step, i).to(device)
            optimizer.step()
    return [whole(p) for p in params]


def error_after_an_overflow(kernel, case: Case):
    """Return what a rank is told in the steps after the first rank's own overflow."""
    try:
        train_scaled(kernel, case, (0,))
    except RuntimeError as error:
        return str(error)
    return None


def assert_second_step_was_none(results) -> None:
    """Neither parameters nor state moved at the second step, and the third moved all of them, on all ranks."""
    for (first, state, _), (second, second_state, _), (third, _, _) in results:
        assert all(map(bits_equal, third, results[0][2][0]))
        assert all(map(bits_equal, first, second))
        assert all(
            bits_equal(buffers[key], other[key]) for buffers, other in zip(state, second_state) for key in buffers
        )
        assert not any(map(bits_equal, second, third))


@pytest.mark.parametrize("name", NAMES)
def test_overflow_in_one_shard_is_no_step_on_any_rank(kernel, pools, name):
    """The scale backs off on all ranks; all copies of the shard overflow, as reduced gradients do.

    Scales are powers of two, which divide out exactly.
    """
    case = case_on(name)
    results = pools(4).run(train_scaled, case, (1, 3) if name == "hsdp" else (1,))
    assert_second_step_was_none(results)
    expected = train_unscaled(kernel, case, (1, 3), pools.device)
    for result in results:
        assert [scale for _, _, scale in result] == [SCALE, SCALE / 2, SCALE / 2]
        assert all(map(bits_equal, result[-1][0], expected))


@pytest.mark.parametrize("name", ["columns and rows", "rows twice", "strided columns"])
def test_overflow_in_any_shard_is_no_step_on_any_rank(pools, name):
    assert_second_step_was_none(pools(4).run(train_scaled, case_on(name), (1,)))


def moved_beside_an_overflow(kernel) -> list[bool]:
    """Return whether a matrix of all ranks, and one of this rank alone, move in a step in which rank 1 overflows."""
    values = torch.ones(12, 8), torch.ones(6, 8)
    params = [sharded(value, layout) for value, layout in zip(values, (LAYOUTS["rows"], None))]
    optimizer = kernel.Muon([(f"{i}.up.weight", p) for i, p in enumerate(params)], lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.found_inf = torch.tensor(float(dist.get_rank() == 1), device=device_of_ranks())
    optimizer.step()
    return [bool((whole(p) != 1).any()) for p in params]


def test_an_overflow_elsewhere_does_not_stop_what_a_rank_has_alone(pools):
    assert pools(4).run(moved_beside_an_overflow) == [[False, rank != 1] for rank in range(4)]


def error_of_scales(kernel, case: Case, scales):
    """Return what a rank is told whose scaler has its own one of `scales`."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.grad_scale = torch.tensor(scales[dist.get_rank()], device=device_of_ranks())
    optimizer.found_inf = torch.zeros((), device=device_of_ranks())
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
        read_last_step(optimizer)
    return str(caught.value)


@pytest.mark.parametrize("scales", [(4.0, 8.0, 4.0, 4.0), (4.0, 8.0, 2.0, 4.0), (1.0, 2.0, 0.25, 2.0)], ids=str)
def test_scales_that_differ_are_named_however_they_are_spaced(pools, scales):
    """Some ranks double the scale where others halve it: codes of powers of two must not cancel."""
    for error in pools(4).run(error_of_scales, case_on("rows"), scales):
        assert "different gradient scales" in error and "rank 1" in error


def error_of_scales_that_moved_on(kernel, case: Case):
    """Return what a rank is told of scales that its scaler has updated before the step's result is read."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    for p in params:
        p.grad = torch.zeros_like(p)
    scale = optimizer.grad_scale = torch.full((), 4.0 * (1 + dist.get_rank()), device=device_of_ranks())
    with mock.patch.object(kernel.step.agreement.meeting.Meeting, "is_known", False):
        optimizer.step()
        scale.fill_(64.0)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
    return str(caught.value)


def test_scales_are_named_that_the_step_had(pools):
    """GradScaler updates its scale in place, and a GPU tells the result of a step later."""
    for error in pools(4).run(error_of_scales_that_moved_on, case_on("rows")):
        assert "rank 0 had 4.0, rank 1 had 8.0" in error


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if "r" in layout.splits])
def test_scalers_of_copies_that_differ_are_named(pools, name):
    """The scaler of a plain tensor asks no other rank. If one copy alone overflowed, scales differ at the next step."""
    for error in pools(4).run(error_after_an_overflow, case_on(name)):
        assert "different gradient scales for first.weight" in error
        assert f"{SCALE / 2}" in error and f"{SCALE}" in error
