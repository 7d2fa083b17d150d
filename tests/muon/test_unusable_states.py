"""Values in a file that no step could use are refused by the name of their parameter, and nothing has changed."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.inside import plan_of
from tests.support.small_model import named_parameters, same_bits, serialized, state_of, take_steps

# Positions in a file of `named_parameters`: that of a matrix, and that of one of AdamW's parameters.
MATRIX, BIAS = 0, 3


def put(position, key, value):
    """Return a change of a saved state: `value`, or what it makes of the saved one, at a key."""

    def change(saved):
        state = saved["state"][position]
        state[key] = value(state[key]) if callable(value) else value

    return change


def cast(dtype):
    return put(MATRIX, "momentum_buffer", lambda momentum: momentum.to(dtype))


def on_meta(saved):
    for state in saved["state"].values():
        state.update({key: value.to("meta") for key, value in state.items()})


def fake(value):
    return FakeTensorMode().from_tensor(value)


def replaced(key, value):
    return lambda saved: saved.update({key: value})


def rounding_step(value):
    return lambda saved: saved["param_groups"][0].update(rounding_step=value)


MATRIX_NAME, BIAS_NAME = r"momentum_buffer of up\.weight", r"step of up\.bias"
FLOATS = r"torch\.float16, torch\.bfloat16, torch\.float32"
DAMAGES = {
    "a whole file on meta": (on_meta, f"{MATRIX_NAME} .*on meta"),
    "momentum on meta": (
        put(MATRIX, "momentum_buffer", lambda m: m.to("meta")),
        rf"{MATRIX_NAME} has no values: .* got \(24, 12\) torch\.bfloat16 on meta",
    ),
    "a count on meta": (put(BIAS, "step", torch.ones((), device="meta")), f"{BIAS_NAME} has no values"),
    "another package's on meta": (
        put(MATRIX, "slow", torch.ones(24, 12, device="meta")),
        r"state slow of up\.weight has no values",
    ),
    "fake momentum": (
        put(MATRIX, "momentum_buffer", fake),
        rf"{MATRIX_NAME} has no values: .* FakeTensorMode, got a fake tensor \(24, 12\) torch\.bfloat16 on",
    ),
    "a fake count": (put(BIAS, "step", fake), f"{BIAS_NAME} has no values"),
    "another package's fake": (
        put(MATRIX, "slow", fake(torch.ones(24, 12))),
        r"state slow of up\.weight has no values",
    ),
    "sparse momentum": (
        put(MATRIX, "momentum_buffer", torch.Tensor.to_sparse),
        rf"{MATRIX_NAME} must be a dense .*torch\.sparse_coo",
    ),
    "sparse averages": (put(BIAS, "exp_avg", torch.Tensor.to_sparse), r"exp_avg of up\.bias must be a dense"),
    **{
        f"momentum in {dtype}": (
            cast(dtype),
            rf"{MATRIX_NAME} .*{FLOATS}, torch\.float64 or torch\.int8, got .* {dtype}",
        )
        for dtype in (torch.float8_e4m3fn, torch.int32, torch.uint8, torch.bool, torch.complex64)
    },
    "complex averages": (
        put(BIAS, "exp_avg", lambda average: average.to(torch.complex64)),
        r"exp_avg of up\.bias must be a dense tensor .*, got .* torch\.complex64",
    ),
    "averages in 8 bits": (
        put(BIAS, "exp_avg_sq", lambda squares: squares.to(torch.int8)),
        rf"exp_avg_sq of up\.bias .*{FLOATS} or torch\.float64, got .* torch\.int8",
    ),
    "momentum of numbers": (put(MATRIX, "momentum_buffer", [1.0]), rf"{MATRIX_NAME} must be .*, got \[1\.0\]"),
    "two counts": (put(BIAS, "step", torch.ones(2)), rf"{BIAS_NAME} must be a number.*, got \(2,\) torch\.float32"),
    "no count": (put(BIAS, "step", torch.ones(0)), rf"{BIAS_NAME} must be a number.*, got \(0,\)"),
    "a count of nan": (put(BIAS, "step", torch.tensor(float("nan"))), rf"{BIAS_NAME} must be at least 0 .*got nan"),
    "a count below zero": (put(BIAS, "step", torch.tensor(-1.0)), rf"{BIAS_NAME} must be at least 0 .*got -1\.0"),
    "a number below zero": (put(BIAS, "step", -1), rf"{BIAS_NAME} must be at least 0 .*got -1"),
    "an infinite count": (put(BIAS, "step", float("inf")), rf"{BIAS_NAME} must be at least 0 and below .*, got inf"),
    "a complex count": (put(BIAS, "step", torch.tensor(1j)), rf"{BIAS_NAME} must be a number.*, got .*complex64"),
    "a word for a count": (put(BIAS, "step", "a"), rf"{BIAS_NAME} must be a number.*, got 'a'"),
    "a verdict for a count": (put(BIAS, "step", True), rf"{BIAS_NAME} must be a number.*, got True"),
    "nothing for a count": (put(BIAS, "step", None), rf"{BIAS_NAME} must be a number.*, got None"),
    "no state": (lambda saved: saved["state"].update({BIAS: None}), r"state of up\.bias must be a dict.*, got None"),
    "states in a list": (replaced("state", []), r"state must be a dict.*, got \[\]"),
    "groups in a dict": (replaced("param_groups", {}), r"param_groups must be a list of dicts with params, got \{\}"),
    "a group of numbers": (replaced("param_groups", [1]), r"param_groups must be a list of dicts .*got \[1\]"),
    "a group without params": (replaced("param_groups", [{}]), r"param_groups must be a list of dicts .*got \[\{\}\]"),
    **{
        f"rounding_step {value!r}": (rounding_step(value), r"rounding_step must be .*, got ")
        for value in ("a", None, 2.5, True, -1, torch.tensor(1))
    },
}


def snapshot(optimizer, params):
    settings = [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
    return copy.deepcopy((params, state_of(optimizer, params))), settings


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_no_step_could_use_changes_nothing(kernel, damage):
    change, words = DAMAGES[damage]
    params, twins = named_parameters(torch.bfloat16), named_parameters(torch.bfloat16)
    settings = dict(stochastic_rounding=True)
    optimizer, twin = kernel.Muon(params.items(), **settings), kernel.Muon(twins.items(), **settings)
    for each, theirs in ((optimizer, params), (twin, twins)):
        take_steps(each, theirs, [0])
    saved = serialized(optimizer.state_dict())
    change(saved)
    (before, state), groups = snapshot(optimizer, params)
    with pytest.raises((ValueError, TypeError), match=f"(?s){words}"):
        optimizer.load_state_dict(saved)
    (after, now), groups_now = snapshot(optimizer, params)
    assert same_bits(before, after) and same_bits(state, now) and groups == groups_now
    take_steps(optimizer, params, [1])
    take_steps(twin, twins, [1])
    assert same_bits(params, twins)


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3.0), torch.tensor(3), torch.tensor([3.0])], ids=repr)
def test_a_count_may_be_any_form_of_a_number(kernel, count):
    """Files of torch before 1.12 have plain numbers."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    saved = serialized(optimizer.state_dict())
    saved["state"][BIAS]["step"] = count
    optimizer.load_state_dict(saved)
    take_steps(optimizer, params, [0])
    assert optimizer.state[params["up.bias"]]["step"] == 4


def test_a_group_counts_roundings_by_a_whole_number(kernel):
    params = named_parameters(torch.bfloat16)
    with pytest.raises(TypeError, match="rounding_step must be a whole number, got 'a'"):
        kernel.Muon([{"params": params.items(), "rounding_step": "a"}], stochastic_rounding=True)


def test_a_sparse_tensor_that_a_wrapper_keeps_does_not_matter(kernel):
    params = named_parameters(torch.float32)
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    optimizer.state[params["up.bias"]]["slow"] = torch.ones(24).to_sparse()
    plan = plan_of(optimizer)
    take_steps(optimizer, params, [1, 2])
    assert plan_of(optimizer) is plan


def test_a_sparse_tensor_put_into_the_state_is_named_by_the_next_step(kernel):
    params = named_parameters(torch.float32)
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    before = copy.deepcopy(params)
    state = optimizer.state[params["up.bias"]]
    state["exp_avg"] = state["exp_avg"].to_sparse()
    with pytest.raises(ValueError, match=r"exp_avg of up\.bias must be a dense tensor .*torch\.sparse_coo"):
        take_steps(optimizer, params, [1])
    assert same_bits(params, before)
