"""State that somebody replaces or removes between steps: the next step brings it into line, or refuses it."""

import pytest
import torch

from tests.support.small_model import named_parameters, set_gradients, take_steps


def put_another(state, key, value):
    state[key] = value


def put_inside(state, key, value):
    state[key].data = value


@pytest.mark.parametrize("place", [torch.clone, torch.detach], ids=["elsewhere", "in its own memory"])
@pytest.mark.parametrize("put", [put_another, put_inside])
@pytest.mark.parametrize("name, key", [("up.weight", "momentum_buffer"), ("up.bias", "exp_avg")])
def test_state_that_is_replaced_by_one_of_another_size_is_refused(kernel, name, key, put, place):
    """torch's kernel for AdamW would write beyond its end."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    state = optimizer.state[params[name]]
    sound = state[key].data
    put(state, key, place(sound[:-1]))
    before = {other: p.detach().clone() for other, p in params.items()}
    for _ in range(2):
        set_gradients(params, 1)
        with pytest.raises(ValueError, match=f"state {key} of {name} has shape"):
            optimizer.step()
    assert all(torch.equal(p, before[other]) for other, p in params.items())
    put(state, key, sound)
    optimizer.step()


@pytest.mark.parametrize("name, key", [("up.weight", "momentum_buffer"), ("wte.weight", "exp_avg")])
def test_state_that_is_replaced_by_another_view_of_it_is_refused(kernel, name, key):
    """It has the same address, bytes and dtype."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    state = optimizer.state[params[name]]
    state[key] = state[key].view(*reversed(state[key].shape))
    set_gradients(params, 1)
    with pytest.raises(ValueError, match=f"state {key} of {name} has shape"):
        optimizer.step()


@pytest.mark.parametrize("removed", [("step",), ("exp_avg",), ("exp_avg_sq",), ("step", "exp_avg")], ids=", ".join)
def test_a_part_of_the_state_of_adamw_is_refused(kernel, removed):
    """Averages of zero beside a count of many steps would make the next update too large, or too small."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0, 1])
    state, before = optimizer.state[params["up.bias"]], {key: p.detach().clone() for key, p in params.items()}
    for key in removed:
        del state[key]
    missing = ", ".join(key for key in ("exp_avg", "exp_avg_sq", "step") if key in removed)
    for _ in range(2):
        set_gradients(params, 2)
        with pytest.raises(
            ValueError, match=f"state {missing} of up.bias is missing, and the rest is there: write del"
        ):
            optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in params.items()) and not state.keys() & set(removed)
    del optimizer.state[params["up.bias"]]
    optimizer.step()
    assert optimizer.state[params["up.bias"]]["step"] == 1 and optimizer.state[params["norm.weight"]]["step"] == 3


@pytest.mark.parametrize("name, key", [("up.weight", "momentum_buffer"), ("up.bias", "exp_avg")])
def test_state_that_is_read_as_integers_is_refused(kernel, name, key):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    tensor = optimizer.state[params[name]][key]
    tensor.data = tensor.data.view(torch.int32)
    set_gradients(params, 1)
    with pytest.raises((TypeError, ValueError), match=f"{key}.*int32|int32.*{key}"):
        optimizer.step()


def test_state_that_is_removed_and_made_anew_in_another_shape_is_refused(kernel):
    """The new tensor may have the address of the old one."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    state = optimizer.state[params["up.bias"]]
    for _ in range(20):
        del state["exp_avg"]
        state["exp_avg"] = torch.zeros(4)
        set_gradients(params, 1)
        with pytest.raises(ValueError, match=r"state exp_avg of up\.bias has shape \(4,\)"):
            optimizer.step()
        state["exp_avg"] = torch.zeros_like(params["up.bias"])
        optimizer.step()


@pytest.mark.parametrize("put", [put_another, put_inside])
def test_state_in_another_dtype_is_brought_into_line(kernel, put):
    """AdamW's goes back to that of its parameters; momentum keeps its dtype, in a plan of its own."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    for state in optimizer.state.values():
        for key in [key for key, value in state.items() if value.ndim]:
            put(state, key, state[key].bfloat16())
    take_steps(optimizer, params, [1])
    dtypes = {key: value.dtype for state in optimizer.state.values() for key, value in state.items() if value.ndim}
    assert dtypes == {"momentum_buffer": torch.bfloat16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def test_momentum_in_another_memory_format_is_brought_into_line(kernel):
    """As after a trip through pinned memory of the same shape; a step could not see it as the parameter's matrix."""
    kernels, steps = [], []
    for _ in range(2):
        p = torch.nn.Parameter(torch.ones(16, 8, 3, 3).contiguous(memory_format=torch.channels_last))
        kernels.append(p)
        steps.append(kernel.Muon([("layers.0.conv.weight", p)]))
    for number in range(2):
        for p, optimizer in zip(kernels, steps):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
            optimizer.step()
        state = steps[0].state[kernels[0]]
        state["momentum_buffer"] = state["momentum_buffer"].contiguous()
    steps[0].step(), steps[1].step()
    assert torch.equal(*kernels)


def test_state_that_is_missing_is_made_though_somebody_keeps_as_many_values(kernel):
    """As a wrapper does that keeps its own beside ours."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    first, *_, last = params.values()
    del optimizer.state[first]
    optimizer.state[last]["average of a wrapper"] = torch.zeros(())
    before = first.detach().clone()
    take_steps(optimizer, params, [1])
    assert not torch.equal(first, before) and first in optimizer.state
