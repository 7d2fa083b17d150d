"""Others keep things in the state, which come through files and copies; what they take away is made again."""

import copy
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Linear, Parameter, Sequential

from tests.support.inside import plan_of
from tests.support.published_muons import CASES
from tests.support.small_model import (
    STATE,
    named_parameters,
    same_bits,
    serialized,
    set_gradients,
    state_of,
    take_steps,
)


class SlowWeights:
    """A wrapper that keeps an average of the weights in the optimizer's state, as Lookahead and schedule-free do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                state = self.optimizer.state[p]
                slow = state.setdefault("slow", p.detach().clone())
                slow.lerp_(p, 0.5)
                p.copy_(slow)
                state["slow_steps"] = state.get("slow_steps", 0) + 1
                state["slow_norm"] = slow.norm()


def wrapped(kernel, params, **settings):
    return SlowWeights(kernel.Muon(params.items(), lr=0.02, **settings))


def clones(params):
    return {name: Parameter(p.detach().clone()) for name, p in params.items()}


def through_a_file(kernel, wrapper, params):
    other, others = wrapped(kernel, twins := clones(params)), twins
    other.optimizer.load_state_dict(serialized(wrapper.optimizer.state_dict()))
    return other, others


def through_the_state_dict(kernel, wrapper, params):
    """In one process: what is loaded is a copy, which later steps of the first one do not move."""
    other, others = wrapped(kernel, twins := clones(params)), twins
    other.optimizer.load_state_dict(wrapper.optimizer.state_dict())
    return other, others


@pytest.mark.parametrize(
    "copied",
    [
        through_a_file,
        through_the_state_dict,
        lambda _, *pair: copy.deepcopy(pair),
        lambda _, *pair: pickle.loads(pickle.dumps(pair)),
    ],
    ids=["file", "state dict", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("settings", [{}, {"momentum_dtype": "int8"}, {"offload": True}], ids=str)
def test_what_a_wrapper_keeps_in_the_state_goes_on_bit_for_bit(kernel, copied, settings):
    params = named_parameters()
    wrapper = wrapped(kernel, params, **settings)
    take_steps(wrapper, params, range(2))
    wrapper.optimizer.explain()
    other, others = copied(kernel, wrapper, params)
    take_steps(wrapper, params, range(2, 4))
    take_steps(other, others, range(2, 4))
    assert same_bits(params, others)
    states = state_of(wrapper.optimizer, params), state_of(other.optimizer, others)
    assert states[0].keys() == states[1].keys() >= {"up.weight/slow", "norm.weight/slow_steps"}
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*map(dict.values, states)))


def test_what_a_wrapper_keeps_comes_through_distributed_state_dicts(kernel):
    torch.manual_seed(0)
    model = Sequential(Linear(8, 16), Linear(16, 8))
    twin = copy.deepcopy(model)
    pairs = [(each, wrapped(kernel, dict(each.named_parameters()))) for each in (model, twin)]
    take_steps(pairs[0][1], dict(model.named_parameters()), range(2))
    saved = get_optimizer_state_dict(model, pairs[0][1].optimizer)
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, pairs[1][1].optimizer, saved)
    for each, wrapper in pairs:
        take_steps(wrapper, dict(each.named_parameters()), range(2, 4))
    assert same_bits(model.state_dict(), twin.state_dict())


def test_what_a_wrapper_keeps_is_cast_as_torch_does(kernel):
    """In the dtype of the parameter: wrappers are written for that. Momentum keeps its own."""
    params = named_parameters()
    wrapper = wrapped(kernel, params)
    take_steps(wrapper, params, [0])
    half = {name: Parameter(p.detach().bfloat16()) for name, p in params.items()}
    other = kernel.Muon(half.items())
    other.load_state_dict(wrapper.optimizer.state_dict())
    state = other.state[half["up.weight"]]
    assert (state["slow"].dtype, state["momentum_buffer"].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(state["slow"], wrapper.optimizer.state[params["up.weight"]]["slow"].bfloat16())


def cleared(optimizer, params):
    optimizer.state.clear()
    return list(params)


def replaced(optimizer, params):
    optimizer.state = type(optimizer.state)(dict)
    return list(params)


def one_deleted(name):
    def take_away(optimizer, params):
        del optimizer.state[params[name]]
        return [name]

    return take_away


def one_emptied(optimizer, params):
    optimizer.state[params["down.weight"]] = {}
    return ["down.weight"]


TAKEN = {
    "all": cleared,
    "the dict": replaced,
    "of a matrix": one_deleted("up.weight"),
    "of a vector": one_deleted("norm.weight"),
    "emptied": one_emptied,
}


@pytest.mark.parametrize(
    "settings", [{}, {"momentum_dtype": "int8"}, {"offload": True}, {"second_moment": "rows"}], ids=str
)
@pytest.mark.parametrize("take_away", TAKEN.values(), ids=TAKEN)
def test_state_that_somebody_has_taken_away_begins_anew(kernel, take_away, settings):
    """As at a restart of ReLoRA: zeros for these parameters, and what there was for the others."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02, **settings)
    take_steps(optimizer, params, range(2))
    others = clones(params)
    expected = kernel.Muon(others.items(), lr=0.02, **settings)
    saved = copy.deepcopy(optimizer.state_dict())
    for name in take_away(optimizer, params):
        position = [name for group in optimizer.param_groups for name in group["param_names"]].index(name)
        del saved["state"][position]
    expected.load_state_dict(saved)
    take_steps(optimizer, params, range(2, 4))
    take_steps(expected, others, range(2, 4))
    assert same_bits(params, others)
    assert same_bits(state_of(optimizer, params), state_of(expected, others))


def test_frozen_parameter_whose_state_is_taken_away_has_none(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    params["up.weight"].requires_grad_(False)
    set_gradients(params, 1, without=["up.weight"])
    optimizer.step()
    del optimizer.state[params["up.weight"]]
    set_gradients(params, 2, without=["up.weight"])
    optimizer.step()
    assert params["up.weight"] not in optimizer.state


def test_only_missing_state_remakes_the_plan(kernel):
    """Not what wrappers add, be it at every step, and not a number that somebody keeps beside the parameters."""
    params = named_parameters()
    wrapper = wrapped(kernel, params)
    take_steps(wrapper, params, [0])
    plan = plan_of(wrapper.optimizer)
    wrapper.optimizer.state["steps"] = 3
    for p in params.values():
        wrapper.optimizer.state[p]["more"] = torch.zeros(2)
    take_steps(wrapper, params, [1])
    assert plan_of(wrapper.optimizer) is plan
    del wrapper.optimizer.state[params["up.weight"]]["momentum_buffer"]
    take_steps(wrapper, params, [2])
    assert plan_of(wrapper.optimizer) is not plan
    assert set(wrapper.optimizer.state[params["up.weight"]]) >= STATE[True]


def foreign(case):
    _, state_dict, source, others, _ = CASES[case]()
    return others.get("adamw_state_dict") or state_dict, "adamw" if others else source


@pytest.mark.parametrize("case", CASES)
def test_file_of_another_optimizer_names_import_state_and_the_source(kernel, case):
    """Nothing is changed."""
    state_dict, source = foreign(case)
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.5)
    take_steps(optimizer, params, [0])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"import_state\(optimizer, state_dict, source='{source}'\)"):
        optimizer.load_state_dict(state_dict)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for i, state in before["state"].items():
        assert same_bits(state, after["state"][i])


def test_what_a_wrapper_keeps_under_a_key_of_its_own_stays(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    optimizer.state["wrapper"] = {"count": 3}
    take_steps(optimizer, params, [0])
    optimizer.param_groups[0]["momentum_dtype"] = "int8"  # remakes the plan
    take_steps(optimizer, params, [1])
    assert optimizer.state["wrapper"] == {"count": 3}


@pytest.mark.parametrize("value", [{"count": 1}, torch.ones(2)], ids=["a dict", "a tensor"])
def test_what_stands_before_the_states_may_be_taken_away(kernel, value):
    """From a file, in whose order torch puts the states; then those of parameters move up by one place."""
    params, others = named_parameters(), named_parameters()
    optimizer, twin = kernel.Muon(params.items()), kernel.Muon(others.items())
    take_steps(optimizer, params, [0])
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {"wrapper": value, **saved["state"]}})
    take_steps(optimizer, params, [1])
    assert next(iter(optimizer.state)) == "wrapper"
    del optimizer.state["wrapper"]
    take_steps(optimizer, params, [2])
    take_steps(twin, others, range(3))
    assert same_bits(params, others) and same_bits(state_of(optimizer, params), state_of(twin, others))


def test_a_number_beside_the_states_of_a_file_is_kept(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {**saved["state"], "updates": 3}})
    take_steps(optimizer, params, [1])
    assert optimizer.state["updates"] == 3
