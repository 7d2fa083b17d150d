"""One rank alone changes what the plan depends on: the step fails on all ranks, and its state is as it was before."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.backends import on_every_backend
from tests.support.inside import muon_settings
from tests.support.pieces import mesh_of
from tests.support.refusals import error_of

PLACEMENTS = {"copies": [Replicate()], "shards": [Shard(0)]}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def made(kernel, placements, settings: dict[str, Any], dtype: torch.dtype = torch.float32):
    """Return an optimizer of a matrix, a frozen matrix and a frozen vector, and these."""
    shapes = {"a.weight": (8, 64), "b.weight": (8, 64), "b.bias": (8,)}
    wholes = {name: torch.randn(size, generator=torch.Generator().manual_seed(1)) for name, size in shapes.items()}
    named = {
        name: nn.Parameter(distribute_tensor(whole.to(dtype), mesh_of((2,)), placements, src_data_rank=None))
        for name, whole in wholes.items()
    }
    for name in ("b.weight", "b.bias"):
        named[name].requires_grad_(False)
    return kernel.Muon(named.items(), lr=0.1, **muon_settings(kernel, settings)), named


def step(optimizer, named: dict[str, nn.Parameter]) -> str | None:
    for p in named.values():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    return error_of(optimizer.step)


def contents(optimizer, named: dict[str, nn.Parameter]) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (name, key): local(value).clone()
        for name, p in named.items()
        for key, value in optimizer.state.get(p, {}).items()
    }


def same_contents(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def changed_on_one_rank(kernel, placements, name: str, loads: bool):
    """Return the error of the step, whether the state is as before it, and the errors of later actions."""
    settings, dtype, change, back = CASES[name]
    optimizer, named = made(kernel, placements, settings, dtype)
    assert step(optimizer, named) is None
    if loads:
        optimizer.load_state_dict(optimizer.state_dict())
    before = contents(optimizer, named)
    if dist.get_rank() == 0:
        change(optimizer, named)
        optimizer.explain()  # makes the plan, so the state is another one before the ranks meet
    error = step(optimizer, named)
    after = contents(optimizer, named)
    if dist.get_rank() == 0:
        back(optimizer, named)
    return error, same_contents(before, after), [step(optimizer, named), error_of(optimizer.check_copies)]


def setting(key: str, value: Any) -> Callable:
    def change(optimizer, _) -> None:
        optimizer.param_groups[0][key] = value

    return change


def without_the_matrix(optimizer, _) -> None:
    for key in ("params", "param_names"):
        optimizer.param_groups[0][key].pop(0)


def with_the_matrix(optimizer, named) -> None:
    optimizer.param_groups[0]["params"].insert(0, named["a.weight"])
    optimizer.param_groups[0]["param_names"].insert(0, "a.weight")


def in_8_bits_without_moments(optimizer, _) -> None:
    """By two plans, the second of which changes what the first has left."""
    optimizer.param_groups[0]["second_moment"] = "none"
    optimizer.explain()
    optimizer.param_groups[0]["momentum_dtype"] = "int8"


def in_full_with_moments(optimizer, _) -> None:
    optimizer.param_groups[0].update(second_moment="rows", momentum_dtype=None)


def trained(name: str, is_trained: bool) -> Callable:
    def change(_, named) -> None:
        named[name].requires_grad_(is_trained)

    return change


MOMENTS, SPLIT, EIGHT_BITS = {"second_moment": "rows"}, {"master_weights": "split"}, {"momentum_dtype": "int8"}
CASES = {
    "no second moments": (MOMENTS, torch.float32, setting("second_moment", "none"), setting("second_moment", "rows")),
    "no master weights": (SPLIT, torch.bfloat16, setting("master_weights", None), setting("master_weights", "split")),
    "momentum in 8 bits": ({}, torch.float32, setting("momentum_dtype", "int8"), setting("momentum_dtype", None)),
    "no momentum in 8 bits": (
        EIGHT_BITS,
        torch.float32,
        setting("momentum_dtype", None),
        setting("momentum_dtype", "int8"),
    ),
    "momentum of another dtype": (
        {"momentum_dtype": "float32"},
        torch.float32,
        setting("momentum_dtype", "bfloat16"),
        setting("momentum_dtype", "float32"),
    ),
    "two plans": (MOMENTS, torch.float32, in_8_bits_without_moments, in_full_with_moments),
    "AdamW": ({}, torch.float32, setting("use_muon", False), setting("use_muon", True)),
    "a parameter taken out": ({}, torch.float32, without_the_matrix, with_the_matrix),
    "a matrix thawed": ({}, torch.float32, trained("b.weight", True), trained("b.weight", False)),
    "a vector thawed": ({}, torch.float32, trained("b.bias", True), trained("b.bias", False)),
}


def written_into(kernel, placements, how: str) -> tuple[str, bool, str | None]:
    """A new optimizer gets momentum, by `.data`. Another one gets master weights, which it has since a change of its
    plan: into the tensors that are there, or in others that take their place.

    Return the error of a step with unlike rates, whether what was written is still there, and the next step's error.
    """
    optimizer, named = made(kernel, placements, {}, torch.bfloat16)
    state = optimizer.state[named["a.weight"]]
    if how == "first step":
        local(state["momentum_buffer"]).data.fill_(3.0)
    else:
        assert step(optimizer, named) is None
        optimizer.param_groups[0]["master_weights"] = "split"
        optimizer.explain()
        if how == "new plan":
            masters = torch.full_like(optimizer.master_weights()["a.weight"], 1.2345678)
            optimizer.load_master_weights({"a.weight": masters})
        else:
            state["remainder"] = torch.ones_like(state["remainder"])
    before = contents(optimizer, named)
    optimizer.param_groups[0]["lr"] = 0.2 if dist.get_rank() == 0 else 0.1
    error = step(optimizer, named)
    is_same = same_contents(before, contents(optimizer, named))
    optimizer.param_groups[0]["lr"] = 0.1
    return error, is_same, step(optimizer, named)


@on_every_backend()
@pytest.mark.parametrize("how", ["first step", "new plan", "other tensors"])
@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=PLACEMENTS)
def test_what_was_written_into_the_state_stays(pools, placements, how):
    for error, is_kept, later in pools(2).run(written_into, placements, how):
        assert "'lr': 0.2" in error and "'lr': 0.1" in error
        assert is_kept and later is None


def disputed_after_a_removal(kernel) -> tuple[str | None, str | None, bool]:
    """All take a matrix out; return the error of that step, of one with unlike plans, and whether its state is back."""
    optimizer, named = made(kernel, PLACEMENTS["copies"], {})
    named["b.weight"].requires_grad_(True)
    assert step(optimizer, named) is None
    without_the_matrix(optimizer, named)
    removed = step(optimizer, named)
    optimizer.param_groups[0]["ns_steps"] = 5 - dist.get_rank()
    return removed, step(optimizer, named), named["a.weight"] in optimizer.state


def test_what_ranks_have_agreed_about_is_not_undone_later(pools):
    for removed, disputed, is_back in pools(2).run(disputed_after_a_removal):
        assert removed is None and "'ns_steps': 4" in disputed and not is_back


@pytest.mark.parametrize("pools", ["gloo"], indirect=True)
@pytest.mark.filterwarnings("ignore:Muon has no matrix")
@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("loads", [False, True], ids=["in mid-run", "after a load"])
@pytest.mark.parametrize("name", CASES)
def test_a_change_on_one_rank_alone_leaves_no_trace(pools, name, placements, loads):
    """A GPU may end in a timeout: nobody waits for it before the messages of unlike plans."""
    for error, is_same, later in pools(2).run(changed_on_one_rank, placements, name, loads):
        assert "ranks disagree about what they update" in error
        assert is_same and later == [None, None]
