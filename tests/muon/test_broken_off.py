"""A step that breaks off is known: neither a step nor a checkpoint goes on from what it left half done."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import nn


def optimizer_of(kernel, device: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)).to(device)
    return kernel.Muon(model.named_parameters(), lr=0.1), list(model.parameters())


def set_gradients(params, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device="cpu").to(p)


def break_off(kernel, optimizer) -> None:
    """Run out of memory behind the momentum of the first batch."""
    failing = mock.patch.object(kernel.step.graphs, "polar_updates", side_effect=torch.OutOfMemoryError("no memory"))
    with failing, pytest.raises(torch.OutOfMemoryError):
        optimizer.step()


def test_step_and_state_dict_refuse_after_a_step_that_broke_off(kernel, device):
    optimizer, params = optimizer_of(kernel, device)
    set_gradients(params, 1)
    break_off(kernel, optimizer)
    before = [p.clone() for p in params]
    for _ in range(2):
        for refused in (optimizer.step, optimizer.state_dict, optimizer.master_weights, optimizer.check_copies):
            with pytest.raises(RuntimeError, match=r"broke off.*load_state_dict"):
                refused()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("copied", [lambda o: o, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_loaded_state_heals_it(kernel, device, copied):
    optimizer, params = optimizer_of(kernel, device)
    set_gradients(params, 1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict()), [p.clone() for p in params]
    set_gradients(params, 2)
    break_off(kernel, optimizer)
    healed = copied(optimizer)
    with pytest.raises(RuntimeError, match="broke off"):
        healed.step()
    healed.load_state_dict(saved[0])
    healed_params = [p for group in healed.param_groups for p in group["params"]]
    by_shape = {tuple(p.shape): old for p, old in zip(params, saved[1])}
    with torch.no_grad():
        for p in healed_params:
            p.copy_(by_shape[tuple(p.shape)])
    expected, others = optimizer_of(kernel, device)
    for seed in (1, 2):
        set_gradients(others, seed)
        expected.step()
    gradients = {tuple(p.shape): p.grad for p in others}
    for p in healed_params:
        p.grad = gradients[tuple(p.shape)].clone()
    healed.step()
    ends = {tuple(p.shape): p for p in others}
    assert all(torch.equal(p, ends[tuple(p.shape)]) for p in healed_params)


def test_a_load_that_broke_off_is_known_and_another_load_heals_it(kernel, device):
    optimizer, params = optimizer_of(kernel, device)
    set_gradients(params, 1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    no_memory = mock.patch.object(kernel.step.state, "placed", side_effect=torch.OutOfMemoryError("no memory"))
    with no_memory, pytest.raises(torch.OutOfMemoryError):
        optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="load broke off"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.step()


@pytest.mark.parametrize("before, after, fails", [(None, "int8", "_fill_"), ("int8", "float32", "dequantized")])
def test_momentum_is_what_it_was_where_memory_runs_out_for_another_form(kernel, device, before, after, fails):
    optimizer, params = optimizer_of(kernel, device)
    for form, seed in ((before, 1), (after, 2)):
        for group in optimizer.param_groups:
            group["momentum_dtype"] = form
        set_gradients(params, seed)
        if form is before:
            optimizer.step()
    kept = {p: dict(optimizer.state[p]) for p in params}
    no_memory = mock.patch.object(kernel.step.state, fails, side_effect=torch.OutOfMemoryError("no memory"))
    with no_memory, pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    for p, state in kept.items():
        assert state.keys() == optimizer.state[p].keys()
        assert all(value is optimizer.state[p][key] for key, value in state.items())
    optimizer.step()


def halves_of(kernel):
    """An optimizer of two parameters whose lower halves it keeps, and their masters, doubled."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(16, 16).bfloat16()) for _ in range(2)]
    optimizer = kernel.Muon([(f"layers.{i}.up.weight", p) for i, p in enumerate(params)], master_weights="split")
    return optimizer, params, {name: 2 * value for name, value in optimizer.master_weights().items()}


def test_masters_that_were_loaded_in_part_are_known(kernel):
    optimizer, params, masters = halves_of(kernel)
    saved = copy.deepcopy(optimizer.state_dict())
    split_, calls = kernel.kernels.master_weights.split_, []

    def once(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        split_(*arguments)

    with mock.patch.object(kernel.step.master_weights, "split_", once), pytest.raises(torch.OutOfMemoryError):
        optimizer.load_master_weights(masters)
    set_gradients(params, 1)
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="broke off"):
            refused()
    optimizer.load_state_dict(saved)
    optimizer.load_master_weights(masters)
    optimizer.step()


def test_masters_do_not_heal_a_step_that_broke_off(kernel):
    """They are not the whole state."""
    optimizer, params, masters = halves_of(kernel)
    set_gradients(params, 1)
    break_off(kernel, optimizer)
    optimizer.load_master_weights(masters)
    with pytest.raises(RuntimeError, match="broke off"):
        optimizer.step()


def test_what_is_found_out_before_anything_moves_leaves_no_mark(kernel, device):
    optimizer, params = optimizer_of(kernel, device)
    set_gradients(params, 1)
    sound, params[0].grad = params[0].grad, params[0].grad.to_sparse()
    with pytest.raises(ValueError, match="dense"):
        optimizer.step()
    params[0].grad = sound
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step()
    optimizer.state_dict()


def seen_while(patched: tuple, runs, look) -> object:
    """Return what `look` returns, or the error that it raises, at the first call of a function while `runs` runs."""
    module, name = patched
    function, seen = getattr(module, name), []

    def looked(*args, **arguments):
        if not seen:
            seen.append(None)
            try:
                seen[0] = look()
            except RuntimeError as error:
                seen[0] = error
        return function(*args, **arguments)

    with mock.patch.object(module, name, looked):
        runs()
    (outcome,) = seen
    return outcome


@pytest.mark.parametrize("method", ["state_dict", "step", "master_weights", "check_copies"])
def test_while_a_step_or_a_load_runs_it_is_said_and_leaves_no_mark(kernel, device, method):
    """As in a signal handler; in another thread it is the same."""
    optimizer, params = optimizer_of(kernel, device)
    set_gradients(params, 1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    runs = {
        (kernel.step.graphs, "polar_updates"): optimizer.step,
        (kernel.step.state, "placed"): lambda: optimizer.load_state_dict(saved),
    }
    for patched, run in runs.items():
        error = seen_while(patched, run, getattr(optimizer, method))
        assert str(error).startswith("a step or load is running, ") and "after each step" in str(error)
        optimizer.step()
        optimizer.state_dict()


def test_a_copy_of_an_optimizer_whose_step_is_running_is_half_done(kernel, device):
    optimizer, params = optimizer_of(kernel, device)
    set_gradients(params, 1)
    copied = seen_while((kernel.step.graphs, "polar_updates"), optimizer.step, lambda: copy.deepcopy(optimizer))
    with pytest.raises(RuntimeError, match="broke off"):
        copied.step()
    optimizer.step()
    copy.deepcopy(optimizer).state_dict()
