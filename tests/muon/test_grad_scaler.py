"""Gradients scaled by a real GradScaler: as if they were not, and where they overflow as if there had been no step."""

import copy

import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.small_model import gradient_of, named_parameters, same_bits, set_gradients, state_of, take_steps

# What makes a difference to how a step treats scaled gradients.
OPTIONS = {
    "adamw": {},
    "nadamw": dict(fallback="nadamw"),
    "tensors": dict(lr=torch.tensor(0.02), weight_decay=torch.tensor(0.3)),
    "independent": dict(decay_mode="independent", maximize=True),
    "cautious": dict(decay_mode="cautious", nesterov=False),
    "cautious nadamw": dict(decay_mode="cautious", fallback="nadamw"),
    "corrected": dict(decay_mode="corrected", lr=torch.tensor(0.02)),
}
# A step that may be captured takes the scale and the overflow as tensors; another one is skipped by the scaler.
IN_STEP = dict(capturable=True)
any_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


class NoReading(TorchDispatchMode):
    """Fails where a tensor's value is asked for, except of `settings`: on a GPU that would wait for it."""

    def __init__(self, settings):
        super().__init__()
        self.settings = settings.values()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_read = function.overloadpacket is torch.ops.aten._local_scalar_dense
        assert not is_read or any(args[0] is value for value in self.settings), "a value was read on the host"
        return function(*args, **(kwargs or {}))


def scaled_step(optimizer, scaler, params, seed, overflow=False):
    """Backward, step and update, of a loss whose gradients are those of `set_gradients` with this seed."""
    optimizer.zero_grad()
    loss = sum((p * gradient_of(name, p, seed)).sum() for name, p in params.items())
    scaler.scale(loss).backward()
    if overflow:
        params["norm.weight"].grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()


@any_options
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capturable", [False, True])
def test_scaled_training_equals_unscaled_training(kernel, options, dtype, capturable):
    """Overflows are no steps in either.

    Bit for bit: scales are powers of two, which divide out exactly, and change after overflows and good steps.
    """
    scaled, plain = named_parameters(dtype), named_parameters(dtype)
    ours = kernel.Muon(scaled.items(), **options, capturable=capturable)
    reference = kernel.Muon(plain.items(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for seed, overflow in enumerate([True, False, False, True, False, False]):
        scaled_step(ours, scaler, scaled, seed, overflow)
        if not overflow:
            set_gradients(plain, seed)
            reference.step()
    assert scaler.get_scale() == 2.0**10
    assert same_bits(scaled, plain)
    assert same_bits(state_of(ours, scaled), state_of(reference, plain))


@any_options
def test_overflow_changes_no_parameter_state_or_gradient(kernel, options):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), **options, **IN_STEP)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled_step(optimizer, scaler, params, 0)
    before, state = copy.deepcopy(params), copy.deepcopy(state_of(optimizer, params))
    scaled_step(optimizer, scaler, params, 1, overflow=True)
    assert same_bits(params, before) and same_bits(state_of(optimizer, params), state)
    assert params["up.weight"].grad.equal(4 * gradient_of("up.weight", params["up.weight"], 1))


@any_options
def test_overflow_is_handled_without_reading_on_the_host(kernel, options):
    params = named_parameters()
    clip = dict(head_dim=6, layers=[("up.weight", "down.weight")])
    optimizer = kernel.Muon(params.items(), qk_clip=clip, **options, **IN_STEP)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    for poison in (1.0, float("inf")):
        set_gradients(params, 0)
        params["norm.weight"].grad *= poison
        with NoReading(options):
            optimizer.observe_qk_logits(0, torch.full((4,), 1e3))
            scaler.step(optimizer)
            optimizer.metrics()
        scaler.update()


@pytest.mark.parametrize("capturable", [False, True])
def test_unscaled_gradients_are_not_unscaled_again(kernel, capturable):
    """They may be unscaled before the step so that they can be clipped, as accelerate and Lightning do."""
    scaled, plain = named_parameters(), named_parameters()
    ours, reference = kernel.Muon(scaled.items(), capturable=capturable), kernel.Muon(plain.items())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    set_gradients(scaled, 0)
    for p in scaled.values():
        p.grad *= 8
    scaler.unscale_(ours)
    torch.nn.utils.clip_grad_norm_(scaled.values(), 1.0)
    scaler.step(ours)
    set_gradients(plain, 0)
    torch.nn.utils.clip_grad_norm_(plain.values(), 1.0)
    reference.step()
    assert same_bits(scaled, plain)


@any_options
def test_step_leaves_scaled_gradients_scaled(kernel, options):
    """torch's fused AdamW would write the unscaled ones back."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), **options, **IN_STEP)
    scaled_step(optimizer, torch.amp.GradScaler("cpu", init_scale=4.0), params, 0)
    assert all(torch.equal(p.grad, 4 * gradient_of(name, p, 0)) for name, p in params.items())


def test_scaler_steps_without_any_gradient(kernel):
    params = named_parameters()
    before = copy.deepcopy(params)
    optimizer = kernel.Muon(params.items(), qk_clip=dict(head_dim=6, layers=[("up.weight", "down.weight")]), **IN_STEP)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert same_bits(params, before)


def test_scale_set_without_a_scaler_is_divided_out(kernel):
    """torch's contract: `grad_scale` may be there without a scaler."""
    scaled, plain = named_parameters(), named_parameters()
    ours, reference = kernel.Muon(scaled.items()), kernel.Muon(plain.items())
    set_gradients(scaled, 0)
    set_gradients(plain, 0)
    for p in scaled.values():
        p.grad *= 16
    ours.grad_scale = torch.tensor(16.0)
    ours.step()
    reference.step()
    assert same_bits(scaled, plain)


@pytest.mark.parametrize("scale, overflow", [(16.0, 0.0), (1.0, 1.0)])
def test_a_step_that_raises_leaves_no_scale_and_no_overflow_to_the_next(kernel, scale, overflow):
    """GradScaler deletes what it has set only after a step that succeeds."""
    params, plain = named_parameters(), named_parameters()
    ours, reference = kernel.Muon(params.items(), **IN_STEP), kernel.Muon(plain.items(), **IN_STEP)
    set_gradients(params, 0)
    params["up.weight"].grad = params["up.weight"].grad.to_sparse()
    ours.grad_scale, ours.found_inf = torch.tensor(scale), torch.tensor(overflow)
    with pytest.raises(ValueError, match="sparse"):
        ours.step()
    take_steps(ours, params, [1])
    take_steps(reference, plain, [1])
    assert same_bits(params, plain)


def test_loops_see_that_an_overflow_was_no_step(kernel):
    """As accelerate and Trainer do, which then leave the schedule where it is: torch's scaler does not call `step`."""
    params, taken = named_parameters(), []
    optimizer = kernel.Muon(params.items())
    optimizer.register_step_post_hook(lambda *_: taken.append(True))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflow, steps in ((False, 1), (True, 1), (False, 2)):
        scaled_step(optimizer, scaler, params, 0, overflow)
        assert len(taken) == steps


def test_only_a_step_that_may_be_captured_unscales_by_itself(kernel):
    """Lightning's plugin for mixed precision refuses to clip gradients for an optimizer that does."""
    optimizer = kernel.Muon(named_parameters().items())
    assert not optimizer._step_supports_amp_scaling
    optimizer.add_param_group({"params": [("more.bias", Parameter(torch.ones(4)))], "capturable": True})
    assert optimizer._step_supports_amp_scaling


@any_options
def test_a_step_leaves_the_gradients_of_a_table_scaled(kernel, options):
    """torch's kernel for AdamW writes them back unscaled, also where it works on the parameter itself."""
    params = {name: Parameter(torch.ones(40, 32)) for name in ("wte.weight", "up.weight")}
    optimizer = kernel.Muon(params.items(), **options, **IN_STEP)
    scaled_step(optimizer, torch.amp.GradScaler("cpu", init_scale=4.0), params, 0)
    assert params["wte.weight"].grad.equal(4 * gradient_of("wte.weight", params["wte.weight"], 0))
