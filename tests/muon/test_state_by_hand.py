"""What a user puts into the state between two steps is refused if no step could use it, before anything changes."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.inside import plan_of
from tests.support.small_model import named_parameters, same_bits, set_gradients, state_of, take_steps

MATRIX, OTHER, BIAS, NORM = "up.weight", "down.weight", "up.bias", "norm.weight"


def inference_clone(x):
    with torch.inference_mode():
        return x.clone()


def fake(x):
    return FakeTensorMode().from_tensor(x)


# A parameter, the key of a tensor of its state, what is put there, and a part of the error.
UNUSABLE = {
    "momentum of integers": (MATRIX, "momentum_buffer", lambda x: x.int(), "must be a dense tensor of .*torch.int32"),
    "complex momentum": (MATRIX, "momentum_buffer", lambda x: x.cfloat(), "must be a dense tensor of .*complex64"),
    "averages in 8 bits": (BIAS, "exp_avg", lambda x: x.char(), "must be a dense tensor of .*torch.int8"),
    "a list": (BIAS, "exp_avg_sq", lambda x: x.tolist(), r"must be a tensor, got \["),
    "nothing": (MATRIX, "momentum_buffer", lambda x: None, "must be a tensor, got None"),
    "no values": (MATRIX, "momentum_buffer", lambda x: x.to("meta"), "has no values: put a tensor with values there"),
    "a fake tensor": (
        MATRIX,
        "momentum_buffer",
        fake,
        r"has no values: .* got a fake tensor \(24, 12\) torch\.float32",
    ),
    "a number": (BIAS, "step", lambda x: 3, "must be a tensor, got 3"),
    "two counts": (BIAS, "step", lambda x: torch.ones(2), r"must have one element, got \(2,\)"),
    "what cannot change": (BIAS, "exp_avg", inference_clone, r"torch\.inference_mode.*put its \.clone\(\) there"),
    "one element for all": (
        MATRIX,
        "momentum_buffer",
        lambda x: torch.zeros(1).expand(x.shape),
        r"several elements at one place, with strides \(0, 0\)\. Put its \.contiguous\(\) there",
    ),
}


def trained(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    return params, optimizer


def refused_and_cured(params, optimizer, words, cure):
    """Two steps that raise and change nothing, and one after `cure`."""
    before = {name: p.detach().clone() for name, p in params.items()}
    for _ in range(2):
        set_gradients(params, 1)
        with pytest.raises((TypeError, ValueError), match=words):
            optimizer.step()
        assert same_bits(params, before)
    cure()
    optimizer.step()
    assert not any(torch.equal(params[name], before[name]) for name in params)


@pytest.mark.parametrize("case", UNUSABLE)
def test_state_that_no_step_could_use_is_refused(kernel, case):
    name, key, change, words = UNUSABLE[case]
    params, optimizer = trained(kernel)
    state = optimizer.state[params[name]]
    sound = state[key]
    state[key] = change(sound)
    refused_and_cured(params, optimizer, f"(?s)state {key} of {name} .*{words}", lambda: state.update({key: sound}))


# The name and key of a tensor, and those of what it is replaced by; a parameter has no key.
SHARED = {
    "momentum is the parameter": (MATRIX, "momentum_buffer", MATRIX, None),
    "an average is the parameter": (BIAS, "exp_avg", BIAS, None),
    "both averages are one": (BIAS, "exp_avg", BIAS, "exp_avg_sq"),
    "an average begins another, longer one": (NORM, "exp_avg_sq", BIAS, "exp_avg_sq"),
    "two parameters have one count": (BIAS, "step", NORM, "step"),
    "two matrices have one momentum": (MATRIX, "momentum_buffer", OTHER, "momentum_buffer"),
}


@pytest.mark.parametrize("case", SHARED)
def test_state_that_shares_memory_is_refused_and_its_clone_is_not(kernel, case):
    name, key, other, other_key = SHARED[case]
    params, optimizer = trained(kernel)
    state, source = optimizer.state[params[name]], params[other]
    shared = source.data if other_key is None else optimizer.state[source][other_key]
    state[key] = shared.flatten()[: state[key].numel()].view(state[key].shape)
    words = f"state {key} of ({name}|{other}) shares memory with .*: put its .clone"
    refused_and_cured(params, optimizer, words, lambda: state.update({key: state[key].clone()}))


def test_parts_of_one_memory_are_a_state(kernel):
    """As when all momentum lies in one flat buffer; nothing but the places differs."""
    params, optimizer = trained(kernel)
    others, other = trained(kernel)
    momenta = [optimizer.state[params[name]] for name in (MATRIX, OTHER)]
    flat = torch.cat([state["momentum_buffer"].flatten() for state in momenta])
    for state, part in zip(momenta, flat.split([state["momentum_buffer"].numel() for state in momenta])):
        state["momentum_buffer"] = part.view(state["momentum_buffer"].shape)
    plan = plan_of(optimizer)
    for each, theirs in ((optimizer, params), (other, others)):
        take_steps(each, theirs, [1])
    assert same_bits(params, others) and plan_of(optimizer) is plan


def test_a_state_dict_may_share_memory(kernel):
    """Loading copies it."""
    params, optimizer = trained(kernel)
    saved = copy.deepcopy(optimizer.state_dict())
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    bias, norm = (saved["state"][names.index(name)] for name in (BIAS, NORM))
    bias["step"] = norm["step"]
    optimizer.load_state_dict(saved)
    take_steps(optimizer, params, [1])
    counts = [value for key, value in state_of(optimizer, params).items() if key.endswith("/step")]
    assert set(map(float, counts)) == {2.0}
