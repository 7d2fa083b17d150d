"""Parameters that are in no group for a while, as in training block by block, and state that is parked meanwhile."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

from tests.muon.test_narrow_device import Run
from tests.support.narrow_device import narrow_device
from tests.support.small_model import named_parameters, same_bits, set_gradients, state_of, take_steps

ABSENT = "up.weight", "wte.weight"  # Muon's, AdamW's


def alone(kernel, **settings):
    """Each parameter in a group of itself."""
    params = named_parameters()
    return params, kernel.Muon([{"params": [each]} for each in params.items()], **settings)


def take_out(optimizer, params):
    """Take the groups of the `ABSENT` out of the optimizer, and return them."""
    theirs = {id(params[name]) for name in ABSENT}
    out = [group for group in optimizer.param_groups if id(group["params"][0]) in theirs]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if id(group["params"][0]) not in theirs]
    return out


MEANWHILE = {
    "nothing": lambda optimizer: None,
    "a step": lambda optimizer: optimizer.step(),
    "a table": lambda optimizer: optimizer.explain(),
    "a save": lambda optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("settings", [{}, {"momentum_dtype": "int8"}, {"second_moment": "rows"}], ids=str)
@pytest.mark.parametrize("meanwhile", MEANWHILE.values(), ids=MEANWHILE)
def test_a_group_that_comes_back_goes_on_with_its_state(kernel, meanwhile, settings):
    """With the bits of one that stayed, and had no gradients meanwhile."""
    (params, optimizer), (others, stayed) = alone(kernel, **settings), alone(kernel, **settings)
    for each, parameters in (optimizer, params), (stayed, others):
        take_steps(each, parameters, range(2))
        set_gradients(parameters, 2, without=ABSENT)
    out = take_out(optimizer, params)
    meanwhile(optimizer)
    meanwhile(stayed)
    optimizer.param_groups.extend(out)
    take_steps(optimizer, params, range(3, 5))
    take_steps(stayed, others, range(3, 5))
    assert same_bits(params, others) and same_bits(state_of(optimizer, params), state_of(stayed, others))
    reasons, theirs = ({row.name: row.reason for row in each.explain().rows} for each in (optimizer, stayed))
    assert reasons == theirs


def test_state_that_is_asked_for_meanwhile_still_waits(kernel):
    """Reading the state of a parameter makes an empty one: torch's state is a defaultdict."""
    params, optimizer = alone(kernel)
    take_steps(optimizer, params, [0])
    expected = {name: dict(optimizer.state[params[name]]) for name in ABSENT}
    out = take_out(optimizer, params)
    for _ in range(2):
        optimizer.explain()
        assert not any(optimizer.state[params[name]] for name in ABSENT)
    optimizer.param_groups.extend(out)
    optimizer.explain()
    assert all(same_bits(optimizer.state[params[name]], expected[name]) for name in ABSENT)


def test_state_that_a_parameter_gets_meanwhile_is_kept(kernel):
    """Not the one that waits."""
    params, optimizer = alone(kernel)
    take_steps(optimizer, params, [0])
    out = take_out(optimizer, params)
    optimizer.explain()
    theirs = torch.ones_like(params["up.weight"])
    optimizer.state[params["up.weight"]] = {"momentum_buffer": theirs}
    optimizer.param_groups.extend(out)
    optimizer.explain()
    assert optimizer.state[params["up.weight"]]["momentum_buffer"] is theirs


def test_a_group_that_comes_back_otherwise_can_be_mended_as_the_error_says(kernel):
    params, optimizer = alone(kernel, second_moment="rows")
    take_steps(optimizer, params, [0])
    out = take_out(optimizer, params)
    optimizer.explain()
    for group in out:
        group["transposed"] = True
    optimizer.param_groups.extend(out)
    with pytest.raises(ValueError, match=r"del optimizer.state\[p\]\['second_moment'\]"):
        optimizer.step()
    del optimizer.state[params["up.weight"]]["second_moment"]
    take_steps(optimizer, params, [1])


def test_state_that_is_deleted_first_begins_anew(kernel):
    params, optimizer = alone(kernel)
    take_steps(optimizer, params, range(2))
    for name in ABSENT:
        del optimizer.state[params[name]]
    out = take_out(optimizer, params)
    optimizer.step()
    optimizer.param_groups.extend(out)
    take_steps(optimizer, params, [2])
    assert [optimizer.state[params[name]]["step"] for name in ("wte.weight", "norm.weight")] == [1, 4]


def test_state_goes_with_a_parameter_that_is_gone(kernel):
    params, optimizer = alone(kernel)
    take_steps(optimizer, params, [0])
    buffer = weakref.ref(optimizer.state[params["up.weight"]]["momentum_buffer"])
    take_out(optimizer, params)
    optimizer.step()
    assert buffer() is not None
    params.clear()
    assert buffer() is None


@pytest.mark.parametrize("returning", [False, True])
def test_a_plan_that_cannot_be_made_loses_no_state(kernel, monkeypatch, returning):
    params, optimizer = alone(kernel)
    take_steps(optimizer, params, range(2))
    expected = {name: copy.deepcopy(optimizer.state[params[name]]) for name in ABSENT}
    out = take_out(optimizer, params)
    if returning:
        optimizer.explain()
        optimizer.param_groups.extend(out)
    with monkeypatch.context() as patched:
        patched.setattr(kernel.step.plan_cache, "make_plan", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.explain()
    if not returning:
        optimizer.param_groups.extend(out)
    optimizer.explain()
    assert all(same_bits(optimizer.state[params[name]], expected[name]) for name in ABSENT)


def test_state_that_is_deleted_after_such_a_plan_begins_anew(kernel, monkeypatch):
    params, optimizer = alone(kernel)
    take_steps(optimizer, params, range(2))
    out = take_out(optimizer, params)
    with monkeypatch.context() as patched:
        patched.setattr(kernel.step.plan_cache, "make_plan", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.explain()
    optimizer.param_groups.extend(out)
    del optimizer.state[params["wte.weight"]]
    optimizer.explain()
    assert [optimizer.state[params[name]]["step"] for name in ("wte.weight", "norm.weight")] == [0, 2]


@pytest.mark.parametrize("steps_after", [0, 1])
def test_a_save_leaves_state_where_somebody_has_parked_it(portable_kernel, steps_after):
    """In host memory, as between the phases of reinforcement learning. The next step brings it back."""
    with narrow_device(portable_kernel, "xpu") as narrow:
        run, other = (Run(portable_kernel, narrow, torch.float32, {}) for _ in range(2))
        kept = other.optimizer.state_dict()["state"]
        saved = {i: {key: x.to("cpu", copy=True) for key, x in state.items()} for i, state in kept.items()}
        for state in run.optimizer.state.values():
            state.update({key: value.to("cpu") for key, value in state.items()})
        for _ in range(2):
            parked = run.optimizer.state_dict()["state"]
            assert {value.device.type for state in parked.values() for value in state.values()} == {"cpu"}
        assert saved.keys() == parked.keys() and all(same_bits(saved[i], parked[i]) for i in saved)
        for _ in range(steps_after):
            run.optimizer.step()
            other.optimizer.step()
            assert {x.device.type for state in run.optimizer.state.values() for x in state.values()} == {"xpu"}
        for p, q in zip(run.parameters.values(), other.parameters.values()):
            assert torch.equal(p.to("cpu"), q.to("cpu"))
