"""Matrices of several groups in one batch: those whose steps take the same recipe, each with its rate and decay."""

import copy

import pytest
import torch
from torch.nn import Parameter

from tests.support.inside import plan_of
from tests.support.small_model import matrix

pytestmark = pytest.mark.kernels_ci


@pytest.mark.parametrize(
    "differs",
    [
        dict(momentum=0.5),
        dict(nesterov=False),
        dict(eps=1e-3),
        dict(maximize=True),
        dict(decay_mode="cautious"),
        dict(momentum_dtype="bfloat16"),
        dict(update_rms=0.1),
    ],
    ids=str,
)
def test_groups_with_equal_recipes_share_a_batch(kernel, monkeypatch, differs):
    """Where products take several matrices at once, as on GPUs; here the plan is asked to believe that of a CPU."""
    monkeypatch.setattr(kernel.plan.batches, "_length", lambda *_: 4)
    params = [Parameter(matrix(16, 16, i)) for i in range(4)]
    groups = [{"params": [p], "lr": 0.1 * i, "weight_decay": 0.1 * i} for i, p in enumerate(params)]
    groups[3].update(differs)
    optimizer = kernel.Muon(groups)
    assert sorted(len(batch.matrices) for batch in plan_of(optimizer).batches) == [1, 3]
    alone = [copy.deepcopy(p) for p in params]
    others = [kernel.Muon([{**group, "params": [p]}]) for group, p in zip(groups, alone)]
    for i, p in enumerate([*params, *alone]):
        p.grad = matrix(16, 16, 10 + i % 4)
    for each in (optimizer, *others):
        each.step()
    # torch's batched products may sum in another order than single ones.
    for p, other in zip(params, alone):
        torch.testing.assert_close(p, other, rtol=0, atol=0.5 * 0.3 * 0.8 * 2**-8 * 16)


def test_matrices_of_one_size_with_unlike_multipliers_step_as_alone(kernel, monkeypatch):
    """As the positions of a kernel, whose updates are divided by the square root of their number, beside a matrix."""
    monkeypatch.setattr(kernel.plan.batches, "_length", lambda *_: 16)
    settings = {"lr": 0.1, "conv_mode": "batched", "ns_dtype": "float64"}
    values = {"up.weight": matrix(8, 4, 0), "conv.weight": matrix(8, 36, 1).view(8, 4, 3, 3)}
    together, alone = ({name: Parameter(value.clone()) for name, value in values.items()} for _ in range(2))
    optimizer = kernel.Muon(together.items(), **settings)
    assert sorted(len(batch.matrices) for batch in plan_of(optimizer).batches) == [1, 9]
    others = [kernel.Muon([pair], **settings) for pair in alone.items()]
    for name, p in [*together.items(), *alone.items()]:
        p.grad = values[name].flip(0)
    for each in (optimizer, *others):
        each.step()
    # torch's batched products may sum in another order. In float64 that may only change the last roundings to float32,
    # of the update, whose elements are at most lr, the multiplier 0.2 * sqrt(8) and about 1, and of the parameter.
    for p, other in zip(together.values(), alone.values()):
        torch.testing.assert_close(p, other, rtol=2**-23, atol=0.1 * 0.2 * 8**0.5 * 2**-23)


def test_batches_follow_the_number_of_threads(kernel):
    """Of matrices whose squares fill a core's cache each thread takes one."""
    params = [Parameter(matrix(300, 300, i)) for i in range(4)]
    optimizer = kernel.Muon([{"params": params}], ns_dtype="float32")
    for threads in (2, 1, 2):
        torch.set_num_threads(threads)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        batched = plan_of(optimizer).batches[0].iteration.products.batched
        expected = threads if batched else 1
        assert {len(batch.matrices) for batch in plan_of(optimizer).batches} == {expected}


def test_parameters_of_two_dtypes_share_no_batch(kernel, monkeypatch):
    """Though their momentum has one: the passes take lists of one dtype."""
    monkeypatch.setattr(kernel.plan.batches, "_length", lambda *_: 4)
    params = [Parameter(matrix(16, 16, i).to(dtype)) for i, dtype in enumerate((torch.float32, torch.bfloat16))]
    optimizer = kernel.Muon([{"params": params}], momentum_dtype="float32")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [len(batch.matrices) for batch in plan_of(optimizer).batches] == [1, 1]


@pytest.mark.parametrize("device, transposed", [("cpu", True), ("meta", False)])
def test_tall_matrices_are_transposed_on_a_cpu_alone(kernel, device, transposed):
    params = {name: Parameter(torch.ones(shape, device=device)) for name, shape in (("a", (12, 8)), ("b", (8, 12)))}
    optimizer = kernel.Muon([(f"{name}.weight", p) for name, p in params.items()])
    optimizer.explain()
    plan = plan_of(optimizer)
    packed = {(m.rows, m.cols): (b.transposed, b.packed_shape) for b in plan.batches for m in b.matrices}
    assert packed == {(12, 8): (transposed, (8, 12) if transposed else (12, 8)), (8, 12): (False, (8, 12))}
