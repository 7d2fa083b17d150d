"""Ranks that disagree, die or are late: an error, before the pool gives them up, which says who and what."""

from __future__ import annotations

import math
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import on_every_backend, read_last_step
from tests.support.inside import muon_settings
from tests.support.sharded_models import LAYOUTS, Case, Layout, Spec, assert_as_alone, part_of

ODD = 2  # the rank that differs
SPECS = tuple(Spec(f"layers.{i}.up.weight", (8 + 4 * i, 12), LAYOUTS["rows"]) for i in range(3))
BIASED = (*SPECS, Spec("layers.0.up.bias", (8,), LAYOUTS["rows"]))


def is_late(name: str, p: torch.Tensor) -> bool:
    return not name.startswith("layers.0")


CLIP = {"layers": [["layers.2.up.weight", "layers.0.up.weight"]], "head_dim": 4}
# What the odd rank has, and what the message must show of it and of the others'.
DIFFERENT = {
    "a shape": ({"specs": (*SPECS[:2], SPECS[2]._replace(shape=(16, 20)))}, ["layers.2.up.weight", "16, 20", "16, 12"]),
    "a name": ({"specs": (*SPECS[:2], SPECS[2]._replace(name="other.weight"))}, ["layers.2.up.weight", "other.weight"]),
    "one more": ({"specs": (*SPECS, Spec("more.weight", (8, 8), LAYOUTS["rows"]))}, ["more.weight"]),
    "one less": ({"specs": SPECS[:2]}, ["layers.2.up.weight"]),
    "the order": ({"specs": SPECS[::-1]}, ["layers.0.up.weight", "layers.2.up.weight"]),
    "a placement": ({"specs": (SPECS[0]._replace(layout=LAYOUTS["columns"]), *SPECS[1:])}, ["layers.0.up.weight"]),
    "the dtype": ({"dtype": torch.bfloat16}, ["layers.0.up.weight", "bfloat16", "float32"]),
    "the work dtype": ({"settings": {"ns_dtype": "bfloat16"}}, ["layers.0.up.weight", "bfloat16", "float32"]),
    "momentum": ({"settings": {"momentum": 0.5}}, ["layers.0.up.weight", "0.5", "0.95"]),
    "nesterov": ({"settings": {"nesterov": False}}, ["layers.0.up.weight", "nesterov"]),
    "ns_steps": ({"settings": {"ns_steps": 3}}, ["layers.0.up.weight", "3", "5"]),
    "lr": ({"settings": {"lr": 0.5}}, ["layers.0.up.weight", "0.5"]),
    "weight_decay": ({"settings": {"weight_decay": 0.5}}, ["layers.0.up.weight", "0.5"]),
    "the branch": ({"settings": {"is_muon": is_late}}, ["layers.0.up.weight", "True", "'use_muon': False"]),
    "the lr of AdamW": ({"settings": {"adamw_lr": 0.5}}, ["layers.0.up.bias", "'lr_factor': 500.0"]),
    "momentum_dtype": ({"settings": {"momentum_dtype": "bfloat16"}}, ["layers.0.up.weight", "bfloat16"]),
    "a function": ({"settings": {"adjust_lr_fn": math.hypot}}, ["layers.0.up.weight", "hypot", "match_rms_adamw"]),
    "qk_clip": ({"settings": {"qk_clip": CLIP}}, ["no qk_clip", "layers.2.up.weight"]),
    "chunk_bytes": ({"settings": {"chunk_bytes": 777}}, ["777"]),
    "chunks_in_flight": ({"settings": {"chunks_in_flight": 7}}, ["7"]),
}
OF_DTYPE = ("the dtype", "momentum_dtype", "the branch")
SECONDS = 5.0  # that a group gives a collective where a test waits for that to end


def errors_of_steps(kernel, case: Case, odd: Case):
    """Return the error that steps end with, None without one, and whether parameters are what they were."""
    case_here = odd if dist.get_rank() == ODD else case
    optimizer, params = built(kernel, case_here)
    before = [p.detach().clone() for p in params]
    try:
        take_steps(case_here, optimizer, params, range(1, 3))
    except (ValueError, RuntimeError) as error:
        same = all(torch.equal(p.to_local(), old.to_local()) for p, old in zip(params, before))
        return type(error).__name__, str(error), same
    return None


def built(kernel, case: Case):
    params = [part_of(case, i) for i in range(len(case.specs))]
    settings = muon_settings(kernel, {"ns_dtype": "float32", **case.settings})
    return kernel.Muon([(spec.name, p) for spec, p in zip(case.specs, params)], **settings), params


def take_steps(case: Case, optimizer, params, steps) -> None:
    for step in steps:
        for i, p in enumerate(params):
            p.grad = part_of(case._replace(seed=step), i).data
        optimizer.step()


@on_every_backend()
@pytest.mark.parametrize("what", DIFFERENT)
def test_disagreeing_ranks_all_say_which_rank_and_what(pools, what):
    """And of a parameter that all have nothing but its name, its shape and what differs."""
    changes, words = DIFFERENT[what]
    case = Case(BIASED if what == "the lr of AdamW" else SPECS)
    for kind, text, unchanged in pools(4).run(errors_of_steps, case, case._replace(**changes)):
        assert kind == "ValueError", text  # a rank that had waited for another in vain would raise RuntimeError
        assert f"rank {ODD}" in text
        assert all(word in text for word in words), text
        assert ("'weight_decay'" in text) == (what == "weight_decay")
        assert ("torch.float32" in text) == (what in OF_DTYPE)
        assert unchanged


def steps_on_another_processor(kernel, case: Case):
    """As `errors_of_steps`, but the odd rank's processor multiplies another dtype."""
    iteration = kernel.iteration
    usual = iteration.CPU_WORK_DTYPE
    if dist.get_rank() == ODD:
        iteration.CPU_WORK_DTYPE = torch.float32 if usual == torch.bfloat16 else torch.bfloat16
    try:
        return errors_of_steps(kernel, case, case)
    finally:
        iteration.CPU_WORK_DTYPE = usual


def test_ranks_on_different_processors_must_agree_on_dtype(pools):
    for kind, text, unchanged in pools(4).run(steps_on_another_processor, Case(SPECS, {"ns_dtype": None})):
        assert (kind, unchanged) == ("ValueError", True)
        assert f"rank {ODD}" in text and "here torch.bfloat16" in text and "here torch.float32" in text


MOVED = {"lr": 0.5, "weight_decay": 0.0, "momentum": 0.5, "adamw_betas": (0.5, 0.5)}


def everything(optimizer, params):
    """Return this rank's parts of parameters and state."""
    tensors = [*params, *(value for p in params for value in optimizer.state[p].values())]
    return [getattr(t, "_local_tensor", t).detach().clone() for t in tensors]


def steps_apart(kernel, case: Case, key: str, odd: tuple[int, ...]):
    """Some ranks move a setting after a step; return the error that this ends with, and whether nothing had moved."""
    optimizer, params = built(kernel, case)
    take_steps(case, optimizer, params, range(1, 3))
    before, setting = everything(optimizer, params), optimizer.param_groups[0][key]
    if dist.get_rank() in odd:
        for group in optimizer.param_groups:
            group[key] = MOVED[key]
    error = error_of_step(case, optimizer, params, 3)
    unmoved = all(map(torch.equal, before, everything(optimizer, params)))
    # It is told once: with equal settings training goes on, and a checkpoint is written.
    for group in optimizer.param_groups:
        group[key] = setting
    take_steps(case, optimizer, params, range(4, 5))
    optimizer.state_dict()
    return error, unmoved and not all(map(torch.equal, before, everything(optimizer, params)))


def error_of_step(case: Case, optimizer, params, step: int) -> str:
    """Return the error that a step ends with, on a GPU the call behind it, which waits for the step's result."""
    with pytest.raises(RuntimeError) as caught:
        take_steps(case, optimizer, params, range(step, step + 1))
        read_last_step(optimizer)
    return str(caught.value)


@pytest.mark.parametrize("key", MOVED)
@pytest.mark.parametrize("name", ["rows", "hsdp", "replicated", "columns and rows"])
@pytest.mark.parametrize("odd", [(ODD,), (2, 3)], ids=["one rank", "a copy"])
@on_every_backend()
def test_settings_changed_on_one_rank_raise_before_anything_moves(pools, name, key, odd):
    """On all ranks, who learn which ones differ.

    Also where copies work for themselves, as two matrices on four ranks, and of what is no matrix, or not exchanged.
    """
    specs = tuple(spec._replace(layout=LAYOUTS[name]) for spec in SPECS[:2])
    specs += () if "1" in LAYOUTS[name].splits else (Spec("layers.0.up.bias", (8,), LAYOUTS[name]),)
    for error, goes_on in pools(4).run(steps_apart, Case(specs, {"chunk_bytes": 500}), key, odd):
        assert goes_on
        moved = re.escape(f"rank 2 had '{key}': {MOVED[key]}")
        assert re.search(rf"for layers\.0\.up\.weight.*: rank 0 had '{key}': [^']*, {moved}$", error)


def change_later(kernel, case: Case, key: str, value):
    """Return the error of steps, None without one, of which the odd rank has changed a setting after some others."""
    optimizer, params = built(kernel, case)
    take_steps(case, optimizer, params, range(1, 4))
    if dist.get_rank() == ODD:
        optimizer.param_groups[0][key] = value
    try:
        take_steps(case, optimizer, params, range(4, 6))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("key, value", [("ns_steps", 2), ("ns_dtype", "bfloat16")])
def test_a_rank_that_changes_a_setting_of_its_own_ends_all(fresh_pool, key, value):
    assert all(fresh_pool.run(change_later, Case(SPECS), key, value))


def die_or_sleep(kernel, case: Case, at_step: int, seconds: float):
    """The odd rank dies before a step, or sleeps; returns the error of the others, None without one."""
    optimizer, params = built(kernel, case)
    take_steps(case, optimizer, params, range(1, at_step))
    if dist.get_rank() == ODD:
        if not seconds:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
    try:
        take_steps(case, optimizer, params, range(at_step, at_step + 2))
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("at_step", [1, 3])
@pytest.mark.parametrize("name", ["rows", "hsdp"])
def test_a_rank_that_is_killed_ends_all_others(fresh_pool, name, at_step):
    case = Case(tuple(spec._replace(layout=LAYOUTS[name]) for spec in SPECS), {"chunk_bytes": 200})
    results = fresh_pool.run(die_or_sleep, case, at_step, 0.0, may_die=(ODD,))
    assert results.pop(ODD) is None
    for text in results:
        assert "up.weight" in text or at_step == 1  # before the first step plans are compared, of all parameters


@pytest.mark.slow
def test_rank_late_beyond_the_timeout_ends_all_others(fresh_pool):
    """Had they waited for it to come, there would be no error."""
    for rank, text in enumerate(fresh_pool.run(die_or_sleep, Case(SPECS), 3, 3 * SECONDS)):
        assert "up.weight" in text
        assert f"rank {rank}" in text


@pytest.mark.slow
def test_rank_late_within_the_timeout_is_waited_for(pools):
    assert pools(4).run(die_or_sleep, Case(SPECS), 3, 1.0) == [None] * 4


def test_pool_with_a_dead_rank_is_replaced(kernel, pools):
    pool = pools(2)
    assert pool.run(die, may_die=(1,)) == [None, None]
    case = Case((Spec("up.weight", (5, 7), Layout((2,), ("0",))),), steps=2)
    assert_as_alone(kernel, pools, case, ranks=2)


def die(kernel):
    if dist.get_rank() == 1:
        os._exit(1)
