"""What wrappers and `module.to()` change between steps without a word is noticed by the next step."""

import pytest
import torch

from tests.support.inside import plan_of
from tests.support.small_model import matrix, named_parameters, set_gradients, take_steps


def cast(p):
    p.data = p.data.double()


def lay_out_by_columns(p):
    p.data = p.data.mT.contiguous().mT


def take_rows_away(p):
    p.data = p.data[:-2].clone()


def become_another_kind(p):
    torch.utils.swap_tensors(p, torch.nn.Buffer(p.data.clone()).requires_grad_())


CHANGES = [cast, lay_out_by_columns, become_another_kind]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_parameter_makes_a_new_plan(kernel, change):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    plan = plan_of(optimizer)
    take_steps(optimizer, params, [1])
    assert plan_of(optimizer) is plan
    params["up.weight"].grad = None
    change(params["up.weight"])
    take_steps(optimizer, params, [2])
    assert plan_of(optimizer) is not plan


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


def parameter(optimizer, p):
    return p


def momentum(optimizer, p):
    return optimizer.state[p]["momentum_buffer" if p.ndim > 1 else "exp_avg"]


@pytest.mark.parametrize("left", [0, 16])
@pytest.mark.parametrize("of", [parameter, momentum])
@pytest.mark.parametrize("name", ["up.weight", "up.bias"])
def test_freed_memory_is_refused_until_it_is_back(kernel, name, of, left):
    """As by what gives the memory of a model or of its optimizer to another model for a while."""
    params, twins = named_parameters(), named_parameters()
    optimizer, twin = kernel.Muon(params.items()), kernel.Muon(twins.items())
    take_steps(optimizer, params, [0])
    tensor = of(optimizer, params[name])
    values, memory = tensor.detach().clone(), tensor.untyped_storage()
    size = memory.size()
    memory.resize_(left)
    set_gradients(params, 1)
    with pytest.raises(ValueError, match=f"the memory of .*{name} was freed: {left} of {size} bytes are left"):
        optimizer.step()
    memory.resize_(size)
    with torch.no_grad():
        tensor.copy_(values)
    optimizer.step()
    take_steps(twin, twins, [0, 1])
    assert all(map(torch.equal, params.values(), twins.values()))


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


def test_parameter_of_another_shape_than_its_state_is_refused(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    take_rows_away(params["up.weight"])
    set_gradients(params, 1)
    with pytest.raises(ValueError, match=r"\(24, 12\).*\(22, 12\)"):
        optimizer.step()


@pytest.mark.parametrize("name", ["up.weight", "up.bias"])
def test_gradient_of_another_shape_is_refused_before_anything_changes(kernel, name):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    before = {other: p.detach().clone() for other, p in params.items()}
    set_gradients(params, 1)
    p = params[name]
    whole, p.data = p.data, p.data[:-2]  # torch takes no gradient of another shape than the parameter's
    p.grad = torch.ones_like(p)
    p.data = whole
    with pytest.raises(ValueError, match=f"gradient of {name} has shape .*, its parameter's"):
        optimizer.step()
    assert all(torch.equal(p, before[other]) for other, p in params.items())


def test_matrices_of_one_batch_keep_their_rates_where_one_misses_its_gradient(kernel, monkeypatch):
    """Groups that differ in their rates share batches: what is left of one is stepped as each matrix alone."""
    monkeypatch.setattr(kernel.plan.batches, "_length", lambda *_: 3)
    rates = {"a": 0.1, "b": 0.2, "c": 0.3}

    def parameters():
        return {name: torch.nn.Parameter(matrix(12, 8, seed)) for seed, name in enumerate(rates)}

    together, alone = parameters(), parameters()
    optimizer = kernel.Muon([{"params": [(name, p)], "lr": rates[name]} for name, p in together.items()])
    assert len(plan_of(optimizer).batches) == 1
    set_gradients(together, 0, without=("b",))
    optimizer.step()
    for name, p in alone.items():
        single = kernel.Muon([(name, p)], lr=rates[name])
        set_gradients({name: p}, 0, without=("b",))
        single.step()
    assert all(torch.equal(together[name], alone[name]) for name in rates)


def test_memory_that_is_freed_at_its_end_is_refused(kernel):
    """As many bytes are left as the parameter has, and it was in the other half."""
    p = torch.nn.Parameter(torch.ones(2, 6, 4)[1])
    optimizer = kernel.Muon([("up.weight", p)])
    take_steps(optimizer, {"up.weight": p}, [0])
    memory = p.untyped_storage()
    set_gradients({"up.weight": p}, 1)
    memory.resize_(memory.size() // 2)
    with pytest.raises(ValueError, match=r"the memory of up\.weight was freed: 96 of 192 bytes are left"):
        optimizer.step()
