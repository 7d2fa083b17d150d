"""Ranks that differ in what they may, or in what they must not: nothing is wrong then without a word."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.backends import read_last_step
from tests.support.pieces import mesh_of
from tests.support.refusals import error_of
from tests.support.sharded_models import whole


def random(*shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_mesh(value: torch.Tensor, placement, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(value, mesh, [placement], src_data_rank=None))


def give_gradients(params, step: int) -> None:
    for i, p in enumerate(params):
        gradient = random(*p.shape, seed=100 * step + i).to(p.dtype)
        is_sharded = isinstance(p, DTensor)
        p.grad = on_mesh(gradient, p.placements[0], p.device_mesh).data if is_sharded else gradient


def rounded_beside_a_matrix_of_one_rank(kernel):
    copied = on_mesh(random(32, 32, seed=0).bfloat16(), Replicate(), mesh_of((2,)))
    beside = [("first.weight", nn.Parameter(random(6, 8, seed=1).bfloat16()))] if dist.get_rank() == 0 else []
    named = [*beside, ("copied.weight", copied)]
    optimizer = kernel.Muon(named, lr=0.02, stochastic_rounding=True, ns_dtype="float32")
    for step in range(3):
        give_gradients([copied, *(p for _, p in beside)], step)
        optimizer.step()
    optimizer.check_copies()
    return whole(copied)


def test_copies_are_rounded_alike_whatever_else_a_rank_has(pools):
    one, other = pools(2).run(rounded_beside_a_matrix_of_one_rank)
    assert torch.equal(one, other)


def errors_of_two_of_one_name(kernel):
    mesh = mesh_of((2,))
    params = [on_mesh(random(6, 8, seed=i), Replicate(), mesh) for i in range(2)]
    optimizer = kernel.Muon([{"params": [("fc.weight", p)]} for p in params])
    give_gradients(params, 0)
    optimizer.step()
    params[1 - dist.get_rank()].grad = None
    missing = error_of(optimizer.step)
    if dist.get_rank() == 0:
        params[0].data.to_local()[0, 0] += 1
    return missing, error_of(optimizer.check_copies)


def test_parameters_of_one_name_are_not_mistaken_for_one_another(pools):
    for missing, drifted in pools(2).run(errors_of_two_of_one_name):
        assert "of one part of fc.weight" in missing and "fc.weight differs between ranks" in drifted


def step_with_another_setting_on_one_rank(kernel, key: str, value):
    mesh = mesh_of((2,))
    params = [on_mesh(random(12 + 4 * i, 8, seed=i), Shard(0), mesh) for i in range(4)]
    named = [(f"layers.{i}.up.weight", p) for i, p in enumerate(params)]
    optimizer = kernel.Muon([{"params": named[:2]}, {"params": named[2:]}])
    give_gradients(params, 0)
    optimizer.step()
    before, usual = [p.to_local().clone() for p in params], optimizer.param_groups[1][key]
    optimizer.param_groups[1][key] = value if dist.get_rank() else usual
    give_gradients(params, 1)
    errors = [error_of(act) for act in (optimizer.step, optimizer.check_copies, optimizer.warmup)]
    unmoved = all(torch.equal(p.to_local(), value) for p, value in zip(params, before))
    optimizer.param_groups[1][key] = usual
    return errors, unmoved, error_of(optimizer.step)


@pytest.mark.parametrize("key, value", [("momentum", 0.5), ("eps", 1e-5), ("nesterov", False), ("lr", 0.5)])
def test_a_setting_of_one_of_several_groups_that_differs_is_named_before_anything_is_sent(pools, key, value):
    """Groups with equal settings share messages, which have other lengths if one rank takes them for unequal ones."""
    for errors, unmoved, later in pools(2).run(step_with_another_setting_on_one_rank, key, value):
        assert all(f"'{key}': {value!r}" in error for error in errors) and unmoved and later is None


def error_of_another_choice(kernel, choice: str) -> str | None:
    p, is_first = on_mesh(random(12, 8, seed=0), Shard(0), mesh_of((2,))), dist.get_rank() == 0
    rounded = (2.0**-11, 2.0**-8) if is_first and choice == "float32 products" else (2.0**-24, 2.0**-24)
    with mock.patch.object(kernel.step.plan_cache, "float32_roundoffs", lambda: rounded):
        optimizer = kernel.Muon([("up.weight", p)], release_grads=is_first and choice == "release_grads")
        give_gradients([p], 0)
        return error_of(optimizer.step)


@pytest.mark.parametrize("choice", ["float32 products", "release_grads", "none"])
def test_a_choice_for_the_whole_optimizer_that_differs_is_named(pools, choice):
    """How torch rounds float32 products decides which iteration a rank runs."""
    for error in pools(2).run(error_of_another_choice, choice):
        assert error is None if choice == "none" else choice in error


class Scale:
    """A multiplier whose text has its address, as a `functools.partial` has."""

    def __init__(self, factor: float):
        self.factor = factor

    def __call__(self, rows: int, cols: int) -> float:
        return self.factor


def errors_of_multipliers(kernel) -> list[str | None]:
    """Return the errors where all ranks have equal multipliers, and where one has another."""
    p, rank = on_mesh(random(12, 8, seed=0), Shard(0), mesh_of((2,))), dist.get_rank()
    kept, errors = [Scale(0.5) for _ in range(rank)], []  # so that addresses differ
    for factor in (0.5, 0.5 + rank):
        kept.append(Scale(factor))
        optimizer = kernel.Muon([("up.weight", p)], adjust_lr_fn=kept[-1])
        give_gradients([p], 0)
        errors.append(error_of(optimizer.step))
    return errors


def test_multipliers_are_compared_by_what_they_give(pools):
    for equal, unequal in pools(2).run(errors_of_multipliers):
        assert equal is None and "0.5 for (12, 8)" in unequal and "1.5 for (12, 8)" in unequal


def error_of_another_build(kernel) -> str | None:
    p = on_mesh(random(12, 8, seed=0), Shard(0), mesh_of((2,)))
    info = kernel.build_info()
    other = dataclasses.replace(info, commit=f"commit of rank {dist.get_rank()}")
    with mock.patch.object(kernel.step.plan_cache, "build_info", lambda: other):
        optimizer = kernel.Muon([("up.weight", p)])
        give_gradients([p], 0)
        return error_of(optimizer.step)


def test_another_build_on_one_rank_is_named(pools):
    """A revision that is not pinned may be another one on another machine."""
    for error in pools(2).run(error_of_another_build):
        assert "commit of rank 0" in error and "commit of rank 1" in error


def trained(kernel, params, groups, **settings) -> list[torch.Tensor]:
    """Return whole parameters after a step about which ranks agree."""
    optimizer = kernel.Muon(groups, ns_dtype="float32", **settings)
    give_gradients(params, 0)
    optimizer.step()
    read_last_step(optimizer)
    return [whole(p) for p in params]


def trained_in_groups(kernel, unlike: bool):
    params = [on_mesh(random(12, 8, seed=i), Shard(0), mesh_of((2,))) for i in range(2)]
    named = [(f"layers.{i}.up.weight", p) for i, p in enumerate(params)]
    is_divided = unlike and dist.get_rank() == 0
    return trained(kernel, params, [{"params": [pair]} for pair in named] if is_divided else [{"params": named}])


def trained_by_tensors_and_data(kernel, shared: bool):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params = [on_mesh(random(12, 8, seed=0), Shard(0), mesh["tp"]), nn.Parameter(random(6, 8, seed=1))]
    exchange = kernel.ExchangeOptions(process_group=mesh.get_group("dp")) if shared else None
    return trained(kernel, params, zip(("up.weight", "plain.weight"), params), exchange=exchange)


@pytest.mark.parametrize("job, ranks", [(trained_in_groups, 2), (trained_by_tensors_and_data, 4)])
def test_ranks_may_differ_in_groups_of_equal_settings_and_in_whom_they_share_copies_with(pools, job, ranks):
    unlike, usual = (pools(ranks).run(job, is_unlike) for is_unlike in (True, False))
    assert all(torch.equal(*pair) for one, other in zip(unlike, usual) for pair in zip(one, other, strict=True))


def trained_in_order(kernel, unlike: bool, sums: bool):
    on = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"], mesh_of((4,))]
    named = [(f"{i}.weight", on_mesh(random(96, 8, seed=i), Shard(0), each)) for i, each in enumerate(on)]
    is_other, exchange = unlike and dist.get_rank() == 0, kernel.ExchangeOptions(sum_gram=sums)
    return trained(kernel, [p for _, p in named], named[::-1] if is_other else named, exchange=exchange)


@pytest.mark.parametrize("sums", [False, True])
def test_ranks_may_list_what_they_share_with_some_and_with_all_in_unlike_orders(pools, sums):
    """Their messages have one order all the same, those to owners and the sums of Gram matrices."""
    unlike, usual = (pools(4).run(trained_in_order, is_unlike, sums) for is_unlike in (True, False))
    assert all(torch.equal(*pair) for one, other in zip(unlike, usual) for pair in zip(one, other, strict=True))


def converted_momentum_of_others(kernel):
    """The first rank alone has the matrix; return its form on each rank, there and back."""
    p = on_mesh(random(12, 128, seed=0), Shard(0), DeviceMesh("cpu", [0]))
    optimizer, forms = kernel.Muon([("up.weight", p)]), []
    for form in ("int8", "float32"):
        if dist.get_rank() == 0:
            give_gradients([p], 0)
        optimizer.step()
        optimizer.param_groups[0]["momentum_dtype"] = form
        optimizer.state_dict()
        forms.append(str(optimizer.state[p]["momentum_buffer"].dtype))
    return forms


def test_momentum_is_converted_on_ranks_without_it(pools):
    assert pools(2).run(converted_momentum_of_others) == [["torch.int8", "torch.float32"]] * 2
