"""A compiled step follows an optimizer whose parameters or state somebody has replaced or put into another order."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support.small_model import same_bits, set_gradients, state_of

Params = dict[str, Tensor]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def replace_parameter(optimizer, params: Params) -> None:
    params["0.weight"] = optimizer.param_groups[0]["params"][0] = Parameter(torch.full((8, 12), 0.3))


def swap_parameters(optimizer, params: Params) -> None:
    group = optimizer.param_groups[0]
    for key in ("params", "param_names"):
        group[key][0], group[key][1] = group[key][1], group[key][0]


def delete_state(optimizer, params: Params) -> None:
    del optimizer.state[params["0.weight"]]


def put_state_last(optimizer, params: Params) -> None:
    optimizer.state[params["0.weight"]] = optimizer.state.pop(params["0.weight"])


def load_state_in_another_order(optimizer, params: Params) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    first, *others = saved["state"]
    saved["state"] = {i: saved["state"][i] for i in (*others, first)}
    optimizer.load_state_dict(saved)


CHANGES = replace_parameter, swap_parameters, delete_state, put_state_last, load_state_in_another_order


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("without", [[], ["1.weight"]], ids=str)
def test_a_changed_optimizer_steps_as_an_eager_one(kernel, backend, change, without):
    """The matrices have one shape, so that nothing but the bits shows whose momentum a step has taken.

    A matrix `without` gradient is not in the graph, and its state has a place among the others.
    """

    def trained(compile_) -> Params:
        torch.manual_seed(0)
        params = {f"{i}.weight": Parameter(torch.randn(8, 12)) for i in range(3)}
        optimizer = kernel.Muon(params.items(), lr=0.02)
        step = compile_(lambda: optimizer.step())
        for seed in range(4):
            if seed == 2:
                change(optimizer, params)
            set_gradients(params, seed)
            for name in without:
                params[name].grad = None
            gradients = [p.grad for p in params.values()]
            step()
            assert all(p.grad is gradient for p, gradient in zip(params.values(), gradients))
        return {**params, **state_of(optimizer, params)}

    expected = trained(lambda step: step)
    assert same_bits(trained(lambda step: torch.compile(step, fullgraph=True, backend=backend)), expected)
