"""torch's own description of optimizers, `OptimizerInfo`, of this one: its error inputs, and generic laws over it."""

import copy
import io
import warnings

import pytest
import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

from tests.support.muon_inputs import TAKEN, UNORDERED, optim_error_inputs, optim_inputs
from tests.support.small_model import named_parameters, same_bits, take_steps


@pytest.fixture(scope="module")
def info(kernel):
    return OptimizerInfo(
        kernel.Muon,
        optim_inputs_func=optim_inputs,
        optim_error_inputs_func=optim_error_inputs,
        supported_impls=(),
        not_og_supported_flags=("maximize", "capturable"),
        has_capturable_arg=True,
        supports_complex=False,
    )


any_input = pytest.mark.parametrize("inputs", optim_inputs(), ids=lambda inputs: inputs.desc)


def build(info, inputs, params=None):
    """An optimizer for `params`, named ones by default, whose tensors are its own."""
    named = named_parameters() if params is None else params
    return info.optim_cls(named.items(), **copy.deepcopy(inputs.kwargs)), named


def loaded(info, inputs, params, saved):
    """An optimizer with the state that was `saved`, and its parameters, copies of `params`."""
    other, others = build(info, inputs, copy.deepcopy(params))
    other.load_state_dict(saved)
    return other, others


def go_on_alike(one, other, seeds):
    """Whether two optimizers, each with its parameters, take the same steps."""
    for optimizer, params in (one, other):
        take_steps(optimizer, params, seeds)
    return same_bits(one[1], other[1])


@pytest.mark.parametrize("number", range(len(optim_error_inputs())))
def test_error_inputs_raise(info, number):
    error = info.optim_error_inputs_func("cpu", torch.float32)[number]
    inputs = error.optimizer_error_input
    params = [Parameter(torch.randn(2, 3)) for _ in range(2)] if inputs.params is None else inputs.params
    if error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(error.error_type, match=error.error_regex):
                info.optim_cls(params, **inputs.kwargs)
    else:
        optimizer = info.optim_cls(params, **inputs.kwargs)
        with pytest.raises(error.error_type, match=error.error_regex):
            optimizer.step()


def test_every_torch_error_input_is_tried_or_accepted():
    described = {error.optimizer_error_input.desc for error in get_error_inputs_for_all_optims("cpu", torch.float32)}
    assert TAKEN < described and len(described - {UNORDERED}) == 6


@pytest.mark.parametrize("impl", ["foreach", "fused", "differentiable"])
def test_unsupported_implementations_are_refused(info, impl):
    """Inputs name none of them, as torch asks of an `OptimizerInfo`."""
    assert impl not in info.supported_impls and not any(
        impl in inputs.kwargs for inputs in info.optim_inputs_func("cpu")
    )
    with pytest.raises(TypeError if impl == "differentiable" else ValueError, match=impl):
        info.optim_cls([Parameter(torch.ones(2, 2))], **{impl: True})


def descend(info, inputs, schedulers=()):
    """Fit one matrix and one vector to an input, as torch's test does; the losses of the first and last step."""
    weight = Parameter(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]] * 10).t().contiguous()[:, :5])
    bias = Parameter(torch.tensor([1.0] * 5))
    x = torch.randn(5, generator=torch.Generator().manual_seed(0))
    optimizer = info.optim_cls([("up.weight", weight), ("up.bias", bias)], **copy.deepcopy(inputs.kwargs))
    running = [make(optimizer) for make in schedulers]
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).pow(2).sum()
        (-loss if inputs.kwargs.get("maximize") else loss).backward()
        return loss.item()

    for _ in range(20):
        losses.append(optimizer.step(closure))
        for scheduler in running:
            scheduler.step(*([losses[-1]] if isinstance(scheduler, ReduceLROnPlateau) else []))
    return losses


@any_input
@pytest.mark.parametrize("scheduled", [False, True])
def test_steps_reduce_the_loss(info, inputs, scheduled):
    for schedulers in info.scheduler_inputs if scheduled else [()]:
        losses = descend(info, inputs, schedulers)
        assert losses[-1] < losses[0]


@any_input
def test_tensor_lr_is_as_good_as_a_number(info, inputs):
    if isinstance(inputs.kwargs.get("lr"), torch.Tensor):
        inputs = OptimizerInput(None, {**inputs.kwargs, "lr": 0.001}, inputs.desc)
    results = []
    for as_tensor in (False, True):
        lr = inputs.kwargs.get("lr", 1e-3)
        kwargs = {**inputs.kwargs, "lr": torch.tensor(lr, dtype=torch.float64) if as_tensor else lr}
        optimizer, params = build(info, OptimizerInput(None, kwargs))
        take_steps(optimizer, params, range(3))
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) is as_tensor
        results.append(params)
    for name in results[0]:
        # torch's fused AdamW reads a tensor in float32.
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-6, atol=1e-6)


@any_input
def test_state_dicts_are_deterministic_and_load_weights_only(info, inputs):
    optimizer, params = build(info, inputs)
    take_steps(optimizer, params, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other, others = loaded(info, inputs, params, torch.load(file, weights_only=True))
    assert repr(other.state_dict()["param_groups"]) == repr(optimizer.state_dict()["param_groups"])
    assert go_on_alike((optimizer, params), (other, others), range(2, 4))


@any_input
def test_state_dicts_from_before_a_flag_load(info, inputs):
    optimizer, params = build(info, inputs)
    take_steps(optimizer, params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for flag in info.not_og_supported_flags:
            del group[flag]
    assert go_on_alike((optimizer, params), loaded(info, inputs, params, saved), [1])


@pytest.mark.parametrize("saved_with_names", [False, True])
def test_state_dicts_load_between_named_and_unnamed(info, saved_with_names):
    """With names that route as shapes alone do."""

    def build_one(named):
        params = {f"{i}.weight": Parameter(torch.ones(8, 6) * i) for i in range(2)} | {
            "2.bias": Parameter(torch.ones(8))
        }
        return info.optim_cls(params.items() if named else params.values(), lr=0.02), params

    (first, params), (second, others) = build_one(saved_with_names), build_one(not saved_with_names)
    take_steps(first, params, range(2))
    second.load_state_dict(first.state_dict())
    for name, p in params.items():
        others[name].data.copy_(p.data)
    assert go_on_alike((first, params), (second, others), [2])


@any_input
@pytest.mark.parametrize("make", [torch.Tensor.item, torch.Tensor.clone], ids=["number", "tensor"])
def test_steps_saved_as_numbers_load(info, inputs, make):
    """As torch saved them long ago."""
    optimizer, params = build(info, inputs)
    take_steps(optimizer, params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = make(state["step"])
    assert go_on_alike((optimizer, params), loaded(info, inputs, params, saved), [1])


@any_input
def test_step_without_gradients_changes_nothing(info, inputs):
    optimizer, params = build(info, inputs)
    before, state = copy.deepcopy(params), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    assert same_bits(params, before) and repr(optimizer.state_dict()) == repr(state)


@any_input
def test_zero_gradients_without_decay_change_no_parameter(info, inputs):
    optimizer, params = build(info, OptimizerInput(None, {**inputs.kwargs, "weight_decay": 0.0}))
    before = copy.deepcopy(params)
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert same_bits(params, before)


@any_input
def test_copies_have_every_public_attribute(info, inputs):
    optimizer, params = build(info, inputs)
    take_steps(optimizer, params, [0])
    before = {name for name in dir(optimizer) if not name.startswith("_")}
    assert {name for name in dir(copy.deepcopy(optimizer)) if not name.startswith("_")} == before
    assert all(value is not None for state in optimizer.state.values() for value in state.values())


@any_input
def test_optimizer_prints_its_groups(info, inputs):
    optimizer, _ = build(info, inputs)
    assert len([line for line in repr(optimizer).splitlines() if line.startswith("  group ")]) > 1
    assert repr(optimizer) == str(optimizer)


def test_global_hooks_are_called_around_the_step(info):
    called = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: called.append("before")),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    ]
    optimizer, params = build(info, OptimizerInput(None, {}))
    take_steps(optimizer, params, [0])
    for hook in hooks:
        hook.remove()
    assert called == ["before", "after"]


def test_profilers_see_the_step_by_its_name(info):
    optimizer, params = build(info, OptimizerInput(None, {}))
    with torch.profiler.profile() as profile:
        take_steps(optimizer, params, [0])
    assert any(event.name == "Optimizer.step#Muon.step" for event in profile.events())
