"""Gradients in another dtype than their parameters', as `p.grad_dtype` allows: a step reads them without rounding."""

import copy

import pytest
import torch
from torch.nn import Linear, Parameter

from tests.support.small_model import gradient_of, matrix, named_parameters, same_bits, set_gradient, state_of

SETTINGS = {
    "default": {},
    "nadamw": {"fallback": "nadamw"},
    "cautious": {"decay_mode": "cautious"},
    "tensors": {"lr": torch.tensor(2.0**-9), "weight_decay": torch.tensor(0.3)},
    "int8": {"momentum_dtype": "int8"},
    "release_grads": {"release_grads": True},
    "stochastic_rounding": {"stochastic_rounding": True},
}
PAIRS = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
]
HALF_OF_THEM = ("up.weight", "up.bias")


def whole_numbers(name, p, seed):
    """A gradient that every dtype has exactly: integers of at most 7 bits."""
    return (32 * gradient_of(name, p, seed).double()).round().clamp(-127, 127)


def trained(kernel, dtype, dtypes, **settings):
    """Everything after three steps of parameters in `dtype`, whose gradients have these dtypes by name."""
    params = named_parameters(dtype)
    optimizer = kernel.Muon(params.items(), **settings)
    for seed in range(3):
        for name, p in params.items():
            set_gradient(p, whole_numbers(name, p, seed).to(dtypes.get(name, dtype)))
        optimizer.step()
    return {**params, **state_of(optimizer, params)}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("dtype, of_gradients", PAIRS, ids=str)
def test_numbers_have_the_same_effect_in_every_dtype(kernel, dtype, of_gradients, settings):
    """Nor does it matter what dtypes the other gradients have, which are read together."""
    expected = trained(kernel, dtype, {}, **settings)
    assert same_bits(trained(kernel, dtype, dict.fromkeys(named_parameters(), of_gradients), **settings), expected)
    assert same_bits(trained(kernel, dtype, dict.fromkeys(HALF_OF_THEM, of_gradients), **settings), expected)


def test_one_batch_reads_gradients_of_several_dtypes(kernel):
    """Three matrices of one shape; the sums of their batch are those of float32 gradients."""
    dtypes = torch.bfloat16, torch.float32, torch.float16
    results = []
    for as_they_are in (True, False):
        params = {f"layers.{i}.up.weight": Parameter(matrix(9, 14, i, torch.bfloat16)) for i in range(len(dtypes))}
        optimizer = kernel.Muon(params.items(), momentum_dtype="float32")
        for i, (p, dtype) in enumerate(zip(params.values(), dtypes)):
            gradient = matrix(9, 14, 10 + i, dtype)
            set_gradient(p, gradient if as_they_are else gradient.float())
        optimizer.step()
        results.append({**params, **state_of(optimizer, params)})
    assert same_bits(*results)


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_masters_have_the_bits_of_float32_training(kernel, fallback):
    """With gradients that bfloat16 would round."""
    halves = named_parameters(torch.bfloat16)
    wholes = {name: Parameter(p.detach().float()) for name, p in halves.items()}
    settings = dict(momentum_dtype="float32", ns_dtype="float32", fallback=fallback)
    ours = kernel.Muon(halves.items(), master_weights="split", **settings)
    reference = kernel.Muon(wholes.items(), **settings)
    for seed in range(3):
        for name, p in wholes.items():
            set_gradient(p, gradient_of(name, p, seed))
            set_gradient(halves[name], p.grad)
        ours.step()
        reference.step()
    assert same_bits(ours.master_weights(), {name: p.detach() for name, p in wholes.items()})


def test_backward_passes_add_up_in_float32(kernel):
    """Of a gradient near 1, bfloat16 would lose each addend of 2^-9; four of them are one of its steps."""
    model = Linear(8, 8, bias=False, dtype=torch.bfloat16)
    weight = model.weight
    weight.grad_dtype = torch.float32
    optimizer = kernel.Muon(model.named_parameters(), momentum_dtype="float32", momentum=0.0, nesterov=False)
    for addend in (1.0, *[2.0**-9] * 4):
        model(torch.full((1, 8), addend, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full((8, 8), 1 + 2.0**-7))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_a_scaled_step_in_pieces_has_the_same_bits(kernel, monkeypatch, fallback, capturable):
    """And one whose gradients overflow changes nothing. GradScaler leaves both to a step that may be captured."""
    results = []
    for at_once, dtype in [(1 << 25, torch.bfloat16), (30, torch.float32)]:
        monkeypatch.setattr(kernel.rules.widened, "WIDENED_AT_ONCE", at_once)
        params = named_parameters(torch.bfloat16)
        optimizer = kernel.Muon(params.items(), fallback=fallback, capturable=capturable)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scaler.scale(torch.zeros(()))
        for seed in range(4):
            before = copy.deepcopy([*params.values(), *state_of(optimizer, params).values()])
            for name, p in params.items():
                set_gradient(p, (scaler.get_scale() * whole_numbers(name, p, seed)).to(dtype))
            params["norm.weight"].grad[0] = float("inf") if seed == 1 else 1.0
            scaler.step(optimizer)
            scaler.update()
            after = [*params.values(), *state_of(optimizer, params).values()]
            assert all(map(torch.equal, after, before)) == (seed == 1)
        results.append({**params, **state_of(optimizer, params)})
    assert same_bits(*results)


def test_a_compiled_step_takes_them_outside_of_the_graph(kernel):
    """Torch's tracer has no tensors of one dtype with gradients of another."""
    results = []
    for compile_ in (lambda step: step, lambda step: torch.compile(step, backend="eager")):
        params = named_parameters(torch.bfloat16)
        optimizer = kernel.Muon(params.items())
        step = compile_(optimizer.step)
        for seed in range(2):
            for name, p in params.items():
                set_gradient(p, gradient_of(name, p, seed).float())
            step()
        results.append({**params, **state_of(optimizer, params)})
    torch._dynamo.reset()
    assert same_bits(*results)


@pytest.mark.parametrize("name", ["up.weight", "up.bias"])
def test_a_gradient_that_would_be_rounded_raises_before_anything_moves(kernel, name):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    for each, p in params.items():
        set_gradient(p, gradient_of(each, p, 0))
    optimizer.step()
    p = params[name]
    set_gradient(p, gradient_of(name, p, 0).double())
    before = {key: value.clone() for key, value in {**params, **state_of(optimizer, params)}.items()}
    with pytest.raises(ValueError, match=rf"gradient of {name} is in torch.float64, needs torch.float32"):
        optimizer.step()
    assert same_bits({**params, **state_of(optimizer, params)}, before)
    g, p.grad = p.grad, None  # as the error says
    p.grad_dtype = p.dtype
    p.grad = g.to(p.dtype)
    optimizer.step()
