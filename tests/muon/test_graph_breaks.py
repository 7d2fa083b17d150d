"""Where a step cannot be an op of a compiled graph the graph breaks, the bits are right, and `fullgraph` says why."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.comptime import ComptimeContext
from torch._dynamo.exc import Unsupported
from torch.distributed.tensor import distribute_tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import StepLR

from tests.support.compiled_steps import clip, made, plain_step, trained
from tests.support.small_model import named_parameters, same_bits, set_gradients


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_a_function_sets_before_the_step_counts_in_it(kernel, backend):
    """The tracer sets it after the graph, so the graph breaks before the step: in one graph it would be wrong."""

    def function(params, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 2 * group["lr"]
        optimizer.step()

    expected = trained(*made(kernel), function)
    assert same_bits(trained(*made(kernel), torch.compile(function, backend=backend)), expected)
    with pytest.raises(Unsupported, match="changed in the same graph"):
        trained(*made(kernel), torch.compile(function, backend=backend, fullgraph=True))


def put_in_place(optimizer, params):
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())


def replace_state(optimizer, params):
    optimizer.state[params["up.weight"]] = dict(optimizer.state[params["up.weight"]])


def replace_momentum(optimizer, params):
    momentum = optimizer.state[params["up.weight"]]["momentum_buffer"]
    optimizer.state[params["up.weight"]]["momentum_buffer"] = 2 * momentum


def replace(name):
    def replace(optimizer, params):
        setattr(optimizer, name, getattr(optimizer, name, None))

    return replace


CHANGES = {name: replace(name) for name in ("param_groups", "state", "grad_scale", "found_inf")}
CHANGES |= {change.__name__: change for change in (put_in_place, replace_state, replace_momentum)}


@pytest.mark.parametrize("change", CHANGES)
def test_all_that_a_step_reads_from_the_optimizer_breaks_the_graph_if_set(kernel, change):
    def function(params, optimizer):
        CHANGES[change](optimizer, params)
        optimizer.step()

    params, optimizer = made(kernel)
    set_gradients(params, 0)
    # torch 2.11 itself sets no attribute of an optimizer in a graph.
    with pytest.raises((Unsupported, AssertionError), match=r"changed in the same graph|Attempted setattr"):
        torch.compile(function, backend="eager", fullgraph=True)(params, optimizer)


@pytest.mark.parametrize("settings", [{}, {"stochastic_rounding": True}, {"offload": True}], ids=str)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_function_that_sets_rates_makes_no_group_capturable(kernel, settings, when):
    """The tracer sets that in its copy of a group, and writes the copy back with the rate."""

    def function(params, optimizer):
        if when == "after":
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * group["lr"]
        if when == "before":
            optimizer.step()

    def run(function):
        params, optimizer = made(kernel, **settings)
        return trained(params, optimizer, function), optimizer

    expected, _ = run(function)
    compiled, optimizer = run(torch.compile(function, backend="eager"))
    assert same_bits(compiled, expected) and not optimizer._step_supports_amp_scaling
    assert not any(group["capturable"] for group in optimizer.state_dict()["param_groups"])


@pytest.mark.parametrize("saved", [False, True])
def test_a_group_is_capturable_as_it_was_made_or_loaded(kernel, saved):
    (_, here), (_, there) = made(kernel, capturable=not saved), made(kernel, capturable=saved)
    here.param_groups[0]["capturable"] = saved
    assert [group["capturable"] for group in here.state_dict()["param_groups"]] == [not saved] * 2
    with pytest.warns(UserWarning, match=f"capturable={saved} instead of {not saved}"):
        here.load_state_dict(there.state_dict())
    assert here._step_supports_amp_scaling == saved


def test_a_tracer_that_looks_otherwise_breaks_the_graph(kernel, monkeypatch):
    expected = trained(*made(kernel), plain_step)
    monkeypatch.delattr(ComptimeContext, "_i_will_not_complain_if_bc_breaks_InstructionTranslator")
    assert same_bits(trained(*made(kernel), torch.compile(plain_step, backend="aot_eager")), expected)
    with pytest.raises(Unsupported, match="changed in the same graph"):
        trained(*made(kernel), torch.compile(plain_step, backend="aot_eager", fullgraph=True))


REFUSED = {
    "closure": ({}, lambda params, optimizer: optimizer.step(lambda: 0.0)),
    "offload": ({"offload": True}, plain_step),
    "release_grads": ({"release_grads": True}, plain_step),
    "qk_clip": ({"qk_clip": {"head_dim": 12, "layers": [("up.weight", "down.weight")]}}, plain_step),
    "lr in a tensor": ({"weight_decay": torch.tensor(0.1)}, plain_step),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_op_of_a_graph_breaks_it_and_is_right(kernel, why):
    settings, function = REFUSED[why]
    expected = trained(*made(kernel, **settings), function)
    assert same_bits(trained(*made(kernel, **settings), torch.compile(function, backend="aot_eager")), expected)
    with pytest.raises(Unsupported, match="cannot be one op of the graph"):
        trained(*made(kernel, **settings), torch.compile(function, backend="aot_eager", fullgraph=True))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_parameters_that_ranks_hold_break_the_graph(kernel, mesh):
    compiled = torch.compile(plain_step, backend="aot_eager", fullgraph=True)
    exchange = kernel.ExchangeOptions(process_group=mesh.get_group())
    with pytest.raises(Unsupported, match="parameters that ranks share"):
        trained(*made(kernel, exchange=exchange), compiled, steps=1)
    sharded = Parameter(distribute_tensor(torch.eye(4), mesh))
    sharded.grad = torch.ones_like(sharded)
    with pytest.raises(Unsupported, match="another class"):
        compiled({}, kernel.Muon([("weight", sharded)]))


def with_backward(params, optimizer):
    (params["up.weight"] ** 2).sum().backward()
    optimizer.step()


def with_zero_grad(params, optimizer):
    optimizer.step()
    optimizer.zero_grad()


def with_clipping(params, optimizer):
    clip(params)
    optimizer.step()


def in_one_graph(function, params, optimizer):
    """Whether torch compiles the function into one graph."""
    torch._dynamo.reset()
    set_gradients(params, 0)
    try:
        torch.compile(function, backend="eager", fullgraph=True)(params, optimizer)
    except Unsupported:
        return False
    return True


@pytest.mark.parametrize("scheduled", [False, True], ids=["", "scheduled"])
@pytest.mark.parametrize("function", [plain_step, with_clipping, with_zero_grad, with_backward])
def test_one_graph_holds_what_it_holds_with_torchs_muon(kernel, function, scheduled):
    """torch itself breaks a graph at `backward` and `zero_grad`, and at a `step` that a scheduler has wrapped."""
    answers = []
    for Muon in (kernel.Muon, torch.optim.Muon):
        params = {"up.weight": named_parameters()["up.weight"]}
        optimizer = Muon(list(params.items()))
        scheduler = StepLR(optimizer, 1) if scheduled else None
        answers.append(in_one_graph(function, params, optimizer))
        del scheduler
    assert answers == 2 * [function in (plain_step, with_clipping) and not scheduled]
