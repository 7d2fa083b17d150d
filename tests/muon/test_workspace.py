"""What a step looks up once follows parameters that move between groups, and keeps no memory from step to step."""

import copy
import weakref

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import same_bits, set_gradients, take_steps


def parameters():
    shapes = {"a.weight": (12, 8), "b.weight": (8, 12), "experts.w": (3, 8, 12), "c.weight": (16, 8)}
    generator = torch.Generator().manual_seed(0)
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def optimizer_of(kernel, params, *cuts, **second):
    named = list(params.items())
    cut = cuts[0] if cuts else 2
    groups = [{"params": named[:cut]}, {"params": named[cut:], **second}]
    return kernel.Muon(groups, expert_keys=["experts"])


@pytest.mark.parametrize("second", [dict(ns_steps=2), dict(use_muon=False)], ids=str)
def test_parameter_that_crosses_to_the_next_group_follows_it(kernel, second):
    """The order of all parameters is the same then, and so are the settings of the groups."""
    params = parameters()
    moved, expected = optimizer_of(kernel, params, 2, **second), copy.deepcopy(params)
    first, last = moved.param_groups
    last["params"].insert(0, first["params"].pop())
    last["param_names"].insert(0, first["param_names"].pop())
    take_steps(moved, params, range(2))
    take_steps(optimizer_of(kernel, expected, 1, **second), expected, range(2))
    assert same_bits(params, expected)


@pytest.mark.parametrize("name", ["a.weight", "experts.w"])
def test_memory_replaced_between_steps_is_free_at_once(kernel, name):
    params = parameters()
    optimizer = optimizer_of(kernel, params)
    take_steps(optimizer, params, [0])
    p, state = params[name], optimizer.state[params[name]]
    old = [weakref.ref(t.untyped_storage()) for t in (p.data, state["momentum_buffer"])]
    p.data = p.data.clone()
    state["momentum_buffer"] = state["momentum_buffer"].clone()
    assert [storage() for storage in old] == [None, None]
    take_steps(optimizer, params, [1])


def to_the_end(state, p):
    """As a library does that takes an entry away for a while: all that follow it move up."""
    state[p] = state.pop(p)


def replaced(state, p):
    state[p] = {key: value.clone() for key, value in state[p].items()}


@pytest.mark.parametrize("change", [to_the_end, replaced])
@pytest.mark.parametrize("name", ["a.weight", "experts.w", "c.weight"])
def test_entries_of_the_state_are_followed(kernel, name, change):
    """A step finds them by their places, which two of these entries have by now."""
    changed, expected = parameters(), parameters()
    first, second = (optimizer_of(kernel, params, use_muon=False) for params in (changed, expected))
    for optimizer, params in ((first, changed), (second, expected)):
        take_steps(optimizer, params, [0])
    old = weakref.ref(next(iter(first.state[changed[name]].values())).untyped_storage())
    change(first.state, changed[name])
    assert (old() is None) is (change is replaced)
    for optimizer, params in ((first, changed), (second, expected)):
        take_steps(optimizer, params, [1, 2])
    assert same_bits(changed, expected)
    assert all(
        torch.equal(value, second.state[expected[other]][key])
        for other, p in changed.items()
        for key, value in first.state[p].items()
    )


@pytest.mark.parametrize("release", [False, True])
def test_gradients_are_free_after_a_step(kernel, release):
    """Those that it releases are gone at its end, the others as soon as somebody clears them."""
    params = parameters()
    optimizer = kernel.Muon(params.items(), expert_keys=["experts"], release_grads=release)
    for seed in range(2):
        set_gradients(params, seed)
        gradients = [weakref.ref(p.grad.untyped_storage()) for p in params.values()]
        optimizer.step()
        if not release:
            optimizer.zero_grad()
        assert [gradient() for gradient in gradients] == [None] * len(params)


def test_step_that_failed_keeps_no_gradient(kernel, monkeypatch):
    params = parameters()
    optimizer = optimizer_of(kernel, params)
    set_gradients(params, 0)
    gradient = weakref.ref(params["experts.w"].grad.untyped_storage())

    def fail(*_):
        raise MemoryError("of the test")

    with monkeypatch.context() as patch:
        patch.setattr(kernel.step.graphs, "polar_updates", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.zero_grad()
    assert gradient() is None


def test_a_parameter_that_lies_elsewhere_has_moved_once(kernel):
    p = Parameter(torch.ones(4, 6))
    premises = kernel.step.premises.Premises([p], (), kernel.Muon([("up.weight", p)]).param_groups)
    p.data = p.data.clone()
    assert premises.have_moved([p])
    premises.remember_places([p])
    assert not premises.have_moved([p])


@pytest.mark.parametrize("what", ["choices", "this_rank"])
def test_a_plan_holds_for_one_choice_of_kernels_and_one_rank(kernel, monkeypatch, what):
    p = Parameter(torch.ones(4, 6))
    groups = kernel.Muon([("up.weight", p)]).param_groups
    premises = kernel.step.premises.Premises([p], (), groups)
    assert premises.hold([p], (), groups)
    monkeypatch.setattr(kernel.step.premises, what, lambda: "another")
    assert not premises.hold([p], (), groups)
