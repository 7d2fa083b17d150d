"""A step in a function that `torch.compile` makes one graph of has the bits of an eager step, and its effects."""

from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import StepLR

from tests.support.compiled_steps import WITHOUT, clip, everything, made, plain_step, trained
from tests.support.small_model import named_parameters, same_bits, set_gradients

# Torch 2.11 makes its first graph for the first rate, and the second one for every other.
GRAPHS_FOR_ALL_RATES = 2 if torch.__version__ < (2, 12) else 1
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("settings", [{}, {"stochastic_rounding": True}, {"momentum_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_have_the_bits_of_eager_ones_without_a_graph_for_each_rate(kernel, backend, settings):
    def function(params, optimizer):
        clip(params)
        optimizer.step()

    expected = trained(*made(kernel, **settings), function)
    params, optimizer = made(kernel, **settings)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert same_bits(trained(params, optimizer, compiled), expected)
    assert counters["stats"]["unique_graphs"] == GRAPHS_FOR_ALL_RATES
    assert optimizer.metrics()["matrices"] == 2 and not any(group["capturable"] for group in optimizer.param_groups)


def test_a_step_is_an_op_for_tracers_that_take_compliant_ones_alone(kernel):
    params, optimizer = made(kernel)
    set_gradients(params, 0)
    with torch._dynamo.config.patch(only_allow_pt2_compliant_ops=True):
        torch.compile(optimizer.step, fullgraph=True, backend="eager")()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_optimizers_step_in_one_graph(kernel, backend):
    def all_of_them(compile_):
        params = named_parameters()
        named = list(params.items())
        optimizers = kernel.Muon(named[:2]), kernel.Muon(named[2:])

        def function():
            for optimizer in optimizers:
                optimizer.step()

        function = compile_(function)
        for seed in range(3):
            set_gradients(params, seed)
            function()
        return {name: value for one in optimizers for name, value in everything(params, one).items()}

    compiled = all_of_them(lambda function: torch.compile(function, fullgraph=True, backend=backend))
    assert same_bits(compiled, all_of_them(lambda function: function))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_may_read_and_write_parameters_and_state_around_the_step(kernel, backend):
    def function(params, optimizer):
        momentum = optimizer.state[params["up.weight"]]["momentum_buffer"]
        square = optimizer.state[params["wte.weight"]]["exp_avg_sq"]
        with torch.no_grad():
            params["up.weight"].mul_(0.5)
            momentum.mul_(0.5)
            square.mul_(0.5)
        optimizer.step()
        # Not their sum: inductor adds in another order.
        seen.append((momentum + params["up.weight"]).detach() + square.max())

    seen = []
    expected, seen_eagerly = trained(*made(kernel), function, steps=2), seen
    seen = []
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert same_bits(trained(*made(kernel), compiled, steps=2), expected)
    assert len(seen) == 2 and all(map(torch.equal, seen, seen_eagerly))


def test_a_gradient_that_the_function_drops_is_not_in_the_step(kernel):
    def function(params, optimizer):
        params["up.weight"].grad = None
        optimizer.step()

    expected = trained(*made(kernel), function, steps=1)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert same_bits(trained(*made(kernel), compiled, steps=1), expected)


def test_a_step_keeps_the_gradients_that_a_graph_has_clipped(kernel):
    params, optimizer = made(kernel)
    set_gradients(params, 0)
    gradients = [p.grad for p in params.values()]

    def function():
        clip(params)
        optimizer.step()

    torch.compile(function, fullgraph=True, backend="aot_eager")()
    assert all(p.grad is gradient for p, gradient in zip(params.values(), gradients))


@pytest.mark.parametrize("states", [[], 2 * [torch.ones(4, 6)]], ids=len)
def test_a_graph_for_another_state_says_so(kernel, states):
    """The tracer makes a new graph before that, unless it overlooks a change."""
    p = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = kernel.Muon([("w", p)])
    with pytest.raises(RuntimeError, match=f"traced with {1 + len(states)} tensors .* the optimizer has 2 now"):
        kernel.step.traced.muon_step_(optimizer._handle, "0", [0], [p], states, [torch.ones(4, 6)])


def test_hooks_run_once(kernel):
    params, optimizer = made(kernel)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    trained(params, optimizer, torch.compile(plain_step, backend="aot_eager", fullgraph=True), steps=2)
    assert calls == ["before", "after"] * 2


def test_schedulers_and_metrics_in_the_same_function(kernel):
    def run(compile_):
        params, optimizer = made(kernel)
        scheduler = StepLR(optimizer, 1, 0.5)

        def function():
            optimizer.step()
            scheduler.step()
            return optimizer.metrics()["muon_update_norm"]

        function, norms = compile_(function), {}
        for seed in range(3):
            set_gradients(params, seed, WITHOUT)
            norms[f"norm {seed}"] = function()
        return {**everything(params, optimizer), **norms}

    assert same_bits(run(lambda function: torch.compile(function, backend="aot_eager")), run(lambda function: function))


def test_a_step_without_gradients_says_so_from_its_graph(kernel):
    params, optimizer = made(kernel, stochastic_rounding=True)
    with pytest.warns(UserWarning, match="no parameter of this optimizer has a gradient"):
        torch.compile(plain_step, backend="aot_eager", fullgraph=True)(params, optimizer)
    assert [group["rounding_step"] for group in optimizer.param_groups] == [1, 1]


def test_errors_reach_the_caller(kernel, monkeypatch):
    params, optimizer = made(kernel)
    compiled = torch.compile(plain_step, backend="aot_eager", fullgraph=True)
    trained(params, optimizer, compiled, steps=1)
    before, gradient = everything(params, optimizer), params["up.weight"].grad
    optimizer.param_groups[0]["momentum"] = 2.0
    with pytest.raises(ValueError, match="momentum"):
        compiled(params, optimizer)
    assert same_bits(everything(params, optimizer), before) and params["up.weight"].grad is gradient
    optimizer.param_groups[0]["momentum"] = 0.9

    def broken(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(kernel.step.update, "update_local_", broken)
    with pytest.raises(OSError, match="the disk is full"):
        compiled(params, optimizer)
    with pytest.raises(RuntimeError, match="the last step or load broke off"):
        compiled(params, optimizer)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_step_their_own_parameters(kernel, duplicate):
    params, optimizer = made(kernel)
    compiled = torch.compile(plain_step, backend="aot_eager", fullgraph=True)
    trained(params, optimizer, compiled, steps=1)
    expected = trained(*copy.deepcopy((params, optimizer)), plain_step)
    assert same_bits(trained(*duplicate((params, optimizer)), compiled), expected)
    assert same_bits(trained(params, optimizer, compiled), expected)


def test_a_compiled_function_keeps_no_optimizer_alive(kernel):
    compiled = torch.compile(plain_step, backend="aot_eager", fullgraph=True)

    def run():
        params, optimizer = made(kernel)
        trained(params, optimizer, compiled, steps=1)
        return weakref.ref(optimizer), weakref.ref(params["up.weight"])

    dead = run()
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


@pytest.fixture
def second_copy(kernel, monkeypatch):
    """Import the same variant again under another name, as a program may do that reloads it."""

    def imported():
        folder = Path(kernel.__file__).parent
        spec = importlib.util.spec_from_file_location(
            "second_copy", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "second_copy", module)
        spec.loader.exec_module(module)
        return module

    return imported


def test_copies_of_a_variant_in_one_process_step_their_optimizers(kernel, second_copy):
    """They share the op, and no handle."""
    pairs = []
    for package in (lambda: kernel, second_copy):
        p = torch.nn.Parameter(torch.ones(4, 6))
        pairs.append((p, package().Muon([("w", p)])))
    for number, (p, optimizer) in enumerate(pairs):
        before = [q.detach().clone() for q, _ in pairs]
        p.grad = torch.eye(4, 6)
        torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="eager", fullgraph=True)()
        assert [torch.equal(q, was) for (q, _), was in zip(pairs, before)] == [number != 0, number != 1]
    assert torch.equal(pairs[0][0], pairs[1][0])
