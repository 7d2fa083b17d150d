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
