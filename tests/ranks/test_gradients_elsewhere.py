"""Gradients that lie otherwise than their parameters: on the same mesh the step redistributes them, else it raises.

The error tells a line to write, which brings the gradient in line. Ranks compare what they would redistribute.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.ranks.test_first_copies import as_on_a_gpu
from tests.support.pieces import mesh_of

SIZE = 8, 6
CASES = ["on another mesh", "plain", "sharded beside a plain parameter"]


def parameter_and_gradient(case: str) -> tuple[nn.Parameter, torch.Tensor]:
    mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    weight, gradient = torch.ones(SIZE), torch.arange(48.0).reshape(SIZE)
    sharded = [distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) for x in (weight, gradient)]
    elsewhere = distribute_tensor(gradient, other, [Replicate(), Shard(0)], src_data_rank=None)
    parameters = dict(zip(CASES, (sharded[0], sharded[0], weight)))
    return nn.Parameter(parameters[case]), dict(zip(CASES, (elsewhere, gradient, sharded[1])))[case]


def step_after_the_advice(kernel, case: str) -> tuple[str, bool]:
    """Return the error, and whether the step after the line that it says gives what the whole gradient gives."""
    p, gradient = parameter_and_gradient(case)
    optimizer = kernel.Muon([("up.weight", p)], lr=0.02)
    p.grad = gradient
    try:
        optimizer.step()
        return "", False
    except ValueError as error:
        text = str(error)
    exec(text.partition("before the step: ")[2], {"p": p, "distribute_tensor": distribute_tensor})
    optimizer.step()
    alone = nn.Parameter(torch.ones(SIZE))
    alone.grad = torch.arange(48.0).reshape(SIZE)
    kernel.Muon([("up.weight", alone)], lr=0.02).step()
    return text, torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, alone)


@pytest.mark.parametrize("case", CASES)
def test_the_line_of_the_error_brings_it_in_line(pools, case):
    for text, is_same in pools(2).run(step_after_the_advice, case):
        assert "its gradient is" in text
        assert is_same, text


def stepped_with_gradients(kernel, placements, dtype=torch.float32):
    """Return the whole parameters, a matrix and a bias, after a step whose gradients have these placements."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    params = {"up.weight": (8, 6), "up.bias": (8,)}
    for name, shape in params.items():
        parts = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        start, gradient = torch.ones(shape, dtype=dtype), sum(parts)
        p = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)], src_data_rank=None))
        p.grad_dtype = torch.float32
        if placements == [Partial()]:
            p.grad = DTensor.from_local(parts[rank], mesh, placements, run_check=False)
        else:
            p.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        params[name] = p
    before = {name: p.grad.to_local().clone() for name, p in params.items()}
    kernel.Muon(params.items()).step()
    unchanged = all(torch.equal(p.grad.to_local(), before[name]) for name, p in params.items())
    return [p.full_tensor().detach() for p in params.values()], unchanged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("placements", [[Partial()], [Replicate()]], ids=str)
def test_gradients_are_brought_to_where_their_parameters_are(pools, placements, dtype):
    """Tensor parallelism gives such ones: of norms in sequence parallelism, and of an embedding cut by rows.

    They are in float32, in which their terms are added.
    """
    expected, _ = pools(2).run(stepped_with_gradients, [Shard(0)], dtype)[0]
    for params, unchanged in pools(2).run(stepped_with_gradients, placements, dtype):
        assert unchanged and all(map(torch.equal, params, expected))


def error_of_a_partial_gradient_on_one_rank(kernel) -> str:
    p = nn.Parameter(distribute_tensor(torch.ones(8), mesh_of((2,)), [Replicate()], src_data_rank=None))
    optimizer = kernel.Muon([("up.bias", p)])
    if dist.get_rank() == 0:
        p.grad = DTensor.from_local(torch.ones(8), mesh_of((2,)), [Partial()], run_check=False)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)


def test_a_partial_gradient_on_one_rank_makes_nobody_wait(pools):
    for text in pools(2).run(error_of_a_partial_gradient_on_one_rank):
        assert "of up.bias, ranks [0] had a gradient and ranks [1] had none" in text


FORMS = {
    "terms": ([Partial()], torch.float32),
    "terms in bfloat16": ([Partial()], torch.bfloat16),
    "whole": ([Replicate()], torch.float32),
    "like its parameter": ([Shard(0)], torch.float32),
    "missing": None,
}
SAID = {
    "terms": "(Partial(sum),) in torch.float32",
    "terms in bfloat16": "(Partial(sum),) in torch.bfloat16",
    "whole": "(Replicate(),) in torch.float32",
    "like its parameter": "none, or one that lies like the parameter",
    "missing": "none, or one that lies like the parameter",
}
UNLIKE = [("terms", other) for other in FORMS if other != "terms"] + [("missing", "terms")]


def error_of_unlike_gradients(kernel, names, steps_before: int) -> tuple[str, bool]:
    """Return the error of a step whose gradient has another form on each rank, and whether it changed the parameter."""
    mesh = mesh_of((2,))
    p = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)], src_data_rank=None))
    p.grad_dtype = None  # any
    forms = [FORMS[name] for name in names]
    optimizer = kernel.Muon([("up.weight", p)])
    for form in (*[([Shard(0)], torch.float32)] * steps_before, forms[dist.get_rank()]):
        before, p.grad = p.to_local().clone(), None
        if form is not None:
            p.grad = distribute_tensor(torch.ones(8, 6, dtype=form[1]), mesh, [Replicate()], src_data_rank=None)
            local = p.grad.to_local() if form[0] != [Shard(0)] else torch.ones(4, 6, dtype=form[1])
            p.grad = DTensor.from_local(local, mesh, form[0], run_check=False)
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error), torch.equal(p.to_local(), before)
    return "", False


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient")
@pytest.mark.parametrize("names", UNLIKE, ids=" and ".join)
def test_gradients_that_ranks_would_redistribute_in_unlike_ways_make_nobody_wait(pools, names, steps_before):
    first, second = (SAID[name] for name in names)
    for text, is_unchanged in pools(2).run(error_of_unlike_gradients, names, steps_before):
        assert f"unlike gradients of up.weight: rank 0 had {first}, rank 1 had {second}; a gradient" in text
        assert is_unchanged


def results_read_by_steps(kernel) -> list[int]:
    """Return how many results of meetings are read by each of three steps that redistribute a gradient."""
    mesh, host_copy = mesh_of((2,)), kernel.kernels.host_copy.HostCopy
    p = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None))
    optimizer, reads = kernel.Muon([("up.bias", p)]), []
    with as_on_a_gpu(kernel), mock.patch.object(host_copy, "_wait", autospec=True) as wait:
        for _ in range(3):
            wait.reset_mock()
            p.grad = distribute_tensor(torch.ones(8), mesh, [Replicate()], src_data_rank=None)
            optimizer.step()
            reads.append(len({id(call.args[0]) for call in wait.call_args_list}))
    return reads


def test_nobody_waits_for_a_gpu_before_gradients_are_redistributed(pools):
    """Only the first step reads its own result; each later one that of the step before."""
    assert pools(2).run(results_read_by_steps) == [[1, 1, 1]] * 2


def without_memory_for_a_gradient(kernel):
    """Rank 0 has no memory to redistribute a gradient; return the kinds and texts of the errors of two steps."""
    mesh = mesh_of((2,))
    p = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None))
    optimizer, errors = kernel.Muon([("up.bias", p)]), []
    p.grad = distribute_tensor(torch.ones(8), mesh, [Replicate()], src_data_rank=None)
    for broken in (dist.get_rank() == 0, False):
        fault = mock.patch.object(DTensor, "redistribute", side_effect=torch.OutOfMemoryError("no memory"))
        with fault if broken else nullcontext():
            try:
                optimizer.step()
                errors.append(None)
            except RuntimeError as error:
                errors.append((type(error).__name__, str(error)))
    return errors


def test_a_rank_without_memory_for_a_gradient_says_so_and_has_not_taken_the_step(pools):
    (first, after), (elsewhere, after_elsewhere) = pools(2).run(without_memory_for_a_gradient)
    assert first == ("OutOfMemoryError", "no memory") and elsewhere is None
    for _, text in (after, after_elsewhere):
        assert "one has taken a step in which the other had an error" in text


def step_with_a_gradient_on_another_mesh(kernel, mesh, placements):
    """Return the error of a step whose gradient is on another mesh, and whether the parameter stayed."""
    p = nn.Parameter(DTensor.from_local(torch.ones(4, 6), mesh_of((2,)), [Shard(0)], run_check=False))
    before = p.to_local().clone()
    optimizer = kernel.Muon([("up.weight", p)])
    p.grad = DTensor.from_local(torch.ones(4, 6), DeviceMesh("cpu", mesh), placements, run_check=False)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error), torch.equal(p.to_local(), before)


@pytest.mark.parametrize("mesh, placements", [([[0], [1]], [Shard(0), Replicate()]), ([1, 0], [Shard(0)])], ids=str)
def test_a_gradient_on_another_mesh_raises(pools, mesh, placements):
    """It raises before anything moves. On the same ranks in another order, parts of one shape are other parts."""
    for text, unmoved in pools(2).run(step_with_a_gradient_on_another_mesh, mesh, placements):
        assert "full_tensor()" in text and unmoved
