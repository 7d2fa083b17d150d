"""Ctrl-C comes when an update is complete: training goes on from there, as after any other error between two steps."""

from __future__ import annotations

import copy
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.muon.test_broken_off import optimizer_of, set_gradients


@pytest.fixture(autouse=True)
def pythons_handler():
    """Ctrl-C comes to Python, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupted(kernel, monkeypatch):
    """Press Ctrl-C so many times between the momentum and the update of the first batch."""
    update = kernel.step.graphs.polar_updates

    def interrupted(times: int) -> None:
        left = [None] * times

        def polar_updates(*args, **kwargs):
            while left:
                left.pop()
                signal.raise_signal(signal.SIGINT)
            return update(*args, **kwargs)

        monkeypatch.setattr(kernel.step.graphs, "polar_updates", polar_updates)

    return interrupted


def test_ctrl_c_comes_when_the_update_is_complete(kernel, device, interrupted):
    """As often as it is pressed in one step after another, and until then Python's handler is there."""
    (optimizer, params), (undisturbed, others) = (optimizer_of(kernel, device) for _ in range(2))
    for seed in range(3):
        set_gradients(others, seed)
        undisturbed.step()
    for seed in range(3):
        set_gradients(params, seed)
        interrupted(1)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert all(map(torch.equal, params, others))
    optimizer.state_dict()


def test_the_second_ctrl_c_breaks_the_update_off(kernel, device, interrupted):
    optimizer, params = optimizer_of(kernel, device)
    before = [p.clone() for p in params]
    set_gradients(params, 1)
    interrupted(2)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    with pytest.raises(RuntimeError, match="broke off"):
        optimizer.step()


def test_python_has_its_handler_again_when_the_second_ctrl_c_raises(kernel):
    """An error that nobody waits for, as in a generator, may leave the context open."""
    handlers = []
    with pytest.raises(KeyboardInterrupt), kernel.step.interrupts.interrupted_at_the_end():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        handlers.append(signal.getsignal(signal.SIGINT))
    assert handlers == [signal.default_int_handler]


@pytest.mark.parametrize("among_ranks, is_complete", [(False, True), (True, False)])
def test_a_change_that_waits_for_ranks_is_interrupted_at_once(kernel, among_ranks, is_complete):
    done = []
    with pytest.raises(KeyboardInterrupt), kernel.step.change.Change().running(among_ranks=among_ranks):
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert bool(done) == is_complete


def test_a_handler_of_the_users_is_called_at_once(kernel, device, interrupted):
    optimizer, params = optimizer_of(kernel, device)
    set_gradients(params, 1)
    interrupted(1)
    before, seen = [p.clone() for p in params], []
    previous = signal.signal(signal.SIGINT, lambda *_: seen.append(all(map(torch.equal, params, before))))
    try:
        optimizer.step()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == [True]


def test_ctrl_c_in_a_load_comes_when_its_copies_are_made(kernel, device, monkeypatch):
    """Else the state would be that of the file, which steps would change."""
    optimizer, params = optimizer_of(kernel, device)
    set_gradients(params, 1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    monkeypatch.setattr(optimizer._agreement, "forget", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(saved)
    set_gradients(params, 2)
    optimizer.step()
    for i, state in kept["state"].items():
        assert all(torch.equal(value, saved["state"][i][key]) for key, value in state.items())


def test_a_step_in_another_thread_leaves_signals_alone(kernel, device):
    """Whichever thread `threading` takes for the main one: that which has imported it."""
    optimizer, params = optimizer_of(kernel, device)
    set_gradients(params, 1)
    before = [p.clone() for p in params]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(optimizer.step).result()
    assert not any(map(torch.equal, params, before))


def test_ctrl_c_in_add_param_group_adds_nothing(kernel, device, monkeypatch):
    """Else half of the group would stay, and a second try would find its parameters there already."""
    optimizer, params = optimizer_of(kernel, device)
    more = [
        (name, torch.nn.Parameter(torch.ones(*shape, device=device))) for name, shape in (("w", (8, 8)), ("b", (8,)))
    ]
    before = [list(group["params"]) for group in optimizer.param_groups]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(optimizer, "_refresh", lambda: signal.raise_signal(signal.SIGINT))
        optimizer.add_param_group({"params": more})
    assert all(a is b for group, old in zip(optimizer.param_groups, before) for a, b in zip(group["params"], old))
    assert len(optimizer.param_groups) == len(before)
    optimizer.add_param_group({"params": more})
    set_gradients([*params, *dict(more).values()], 1)
    optimizer.step()
    assert not any(bool((p == 1).all()) for _, p in more)
