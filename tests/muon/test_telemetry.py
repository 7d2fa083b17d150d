"""What an optimizer tells: metrics of the last step against plain ones, progress of its warm-up, what runs."""

import copy
import math
import re

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import (
    gradient_of,
    named_parameters,
    same_bits,
    set_gradients,
    state_of,
    take_steps,
)

MATRICES = ("up.weight", "down.weight")


def norm_of(tensors):
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("maximize", [False, True])
def test_metrics_are_the_norms_of_the_step(kernel, fallback, maximize):
    """Without weight decay the update is the difference that the step has made, but for its rounding."""
    params = named_parameters(torch.float64)
    optimizer = kernel.Muon(
        params.items(), lr=0.02, adamw_lr=0.003, weight_decay=0.0, fallback=fallback, maximize=maximize
    )
    take_steps(optimizer, params, range(3))
    before = copy.deepcopy(params)
    take_steps(optimizer, params, [3])
    metrics = optimizer.metrics()
    moved = {name: (p - before[name]).detach() for name, p in params.items()}
    matrices = [moved[name] for name in MATRICES]
    gradients = {name: p.grad for name, p in params.items()}
    expected = {
        "matrices": 2,
        "matrices_not_finite": 0,
        "muon_update_norm": norm_of(matrices),
        "muon_update_rms": norm_of(matrices) / math.sqrt(sum(m.numel() for m in matrices)),
        "muon_gradient_norm": norm_of(gradients.pop(name) for name in MATRICES),
        "fallback_gradient_norm": norm_of(gradients.values()),
    }
    assert metrics.keys() == expected.keys()
    # Norms of polar factors are float32.
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "settings", [{}, {"renormalize": "rows"}, {"stochastic_rounding": True}, {"master_weights": "split"}], ids=str
)
def test_norms_of_the_descent_are_those_of_a_pass(kernel, monkeypatch, settings):
    """The pass rounds a norm to float32, and its product with the step's size."""
    runs = []
    for descended in True, False:
        if not descended:
            monkeypatch.setattr(kernel.step.batch, "norms_memory_for_descent", lambda *_: None)
        params = named_parameters(torch.bfloat16)
        optimizer = kernel.Muon(params.items(), **settings)
        take_steps(optimizer, params, range(3))
        metrics = {name: value.item() for name, value in optimizer.metrics().items()}
        runs.append((params, metrics, optimizer._norms[0].norms.dtype))
    (params, metrics, wide), (others, passed, single) = runs
    assert same_bits(params, others) and (wide, single) == (torch.float64, torch.float32)
    assert metrics == pytest.approx(passed, rel=2 * 2.0**-24, abs=0)


@pytest.mark.parametrize(
    "dtype, settings, passes",
    [
        (torch.float32, {}, 0),
        (torch.float32, {"renormalize": "rows"}, 0),
        (torch.float32, {"second_moment": "rows"}, 1),
        (torch.float32, {"experimental_hyperball": True}, 0),
        (torch.float64, {}, 1),
        (torch.float64, {"experimental_hyperball": True}, 0),
    ],
    ids=str,
)
def test_norms_take_a_pass_only_where_the_descent_cannot_write_them(kernel, monkeypatch, dtype, settings, passes):
    """Norms are those of updates before second moments change them, and the kernels' are not of float64.

    Hyperball's are of its own steps.
    """
    step, taken = kernel.step.finish, []
    norms_of_updates = step.norms_of_updates
    monkeypatch.setattr(step, "norms_of_updates", lambda updates: taken.append(1) or norms_of_updates(updates))
    params = {"up.weight": Parameter(torch.ones(24, 12, dtype=dtype))}
    take_steps(kernel.Muon(params.items(), **settings), params, [0])
    assert len(taken) == passes


def test_update_rms_is_that_of_adamw(kernel):
    """0.2 with singular values of 1, which are within [0.863, 1.131] here."""
    params = {"wide.weight": Parameter(torch.zeros(64, 512))}
    optimizer = kernel.Muon(params.items(), lr=0.5, ns_dtype="float32")
    take_steps(optimizer, params, [0])
    assert 0.863 <= optimizer.metrics()["muon_update_rms"] / (0.5 * 0.2) <= 1.131


def test_metrics_have_constant_names(kernel):
    """Also before the first step and without gradients, where all are zero."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    fresh = optimizer.metrics()
    take_steps(optimizer, params, [0])
    after = optimizer.metrics()
    set_gradients(params, 0, without=params)
    optimizer.step()
    for metrics in (fresh, optimizer.metrics()):
        assert metrics.keys() == after.keys() and all(value == 0 for value in metrics.values())
    assert all(isinstance(value, torch.Tensor) and value.ndim == 0 for value in after.values())


def test_non_finite_matrices_are_counted_and_others_go_on(kernel):
    params = {f"{i}.weight": Parameter(torch.zeros(8, 8)) for i in range(4)}
    optimizer = kernel.Muon(params.items())
    for name, value in (("1.weight", float("nan")), ("2.weight", float("inf"))):
        set_gradients(params, 0)
        params[name].grad[3, 3] = value
        optimizer.step()
        assert optimizer.metrics()["matrices_not_finite"] == 1 + (name == "2.weight")
    finite = [bool(p.isfinite().all()) for p in params.values()]
    assert finite == [True, False, False, True]


def test_metrics_stay_when_a_tensor_lr_changes(kernel):
    params = named_parameters()
    lr = torch.tensor(0.02)
    optimizer = kernel.Muon(params.items(), lr=lr)
    take_steps(optimizer, params, [0])
    before = optimizer.metrics()
    lr.fill_(5.0)
    assert optimizer.metrics() == before


def test_metrics_stay_when_a_scale_changes_after_the_step(kernel):
    """GradScaler hands over a new tensor each time; a loop of one's own may keep one and change it in place."""
    params, scale = named_parameters(), torch.tensor(4.0)
    optimizer = kernel.Muon(params.items(), capturable=True)
    optimizer.grad_scale = scale
    take_steps(optimizer, params, [0])
    before = optimizer.metrics()
    scale.fill_(8.0)
    assert optimizer.metrics() == before


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_metrics_are_of_unscaled_gradients(kernel, fallback, capturable):
    runs = []
    for scale in (1.0, 1024.0):
        params = named_parameters()
        optimizer = kernel.Muon(params.items(), fallback=fallback, capturable=capturable)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.zeros(()))
        for name, p in params.items():
            p.grad = scale * gradient_of(name, p, 0)
        scaler.step(optimizer)
        scaler.update(3.0)
        runs.append({key: value.item() for key, value in optimizer.metrics().items()})
    assert runs[0] == pytest.approx(runs[1], rel=1e-6) and runs[0]["fallback_gradient_norm"] > 1


def test_overflowed_step_reports_no_updates(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), capturable=True)
    take_steps(optimizer, params, [0])
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    set_gradients(params, 1)
    for name in ("norm.weight", "up.weight"):
        params[name].grad.view(-1)[0] = float("nan")
    scaler.step(optimizer)
    metrics = optimizer.metrics()
    assert metrics["muon_update_norm"] == 0 and metrics["muon_update_rms"] == 0
    assert metrics["matrices_not_finite"] == 0  # nothing was updated with what is not finite


@pytest.mark.parametrize("active, count, norm, rms", [([False, True], 1, 3.0, 1.5), ([False, False], 0, 0.0, 0.0)])
def test_matrices_without_a_gradient_on_any_rank_do_not_count(kernel, active, count, norm, rms):
    """Whatever is in the place of their norms; also if there is no other matrix."""
    norms, one = torch.tensor([math.nan, 3.0], dtype=torch.float64), torch.tensor(1.0)
    update = kernel.step.finish.UpdateNorms(norms, 4, 1.0, one, torch.tensor(active))
    metrics = {key: value.item() for key, value in kernel.step.metrics.update_metrics([update]).items()}
    names = "matrices", "matrices_not_finite", "muon_update_norm", "muon_update_rms"
    assert metrics == dict(zip(names, (count, 0, norm, rms)))


def test_copies_have_their_own_metrics(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    other, others = copy.deepcopy((optimizer, params))
    assert other.metrics()["matrices"] == 0
    take_steps(other, others, [1])
    assert other.metrics()["matrices"] == 2


def test_warmup_changes_nothing_and_reports_progress(kernel, capsys):
    params = named_parameters()
    params["half.weight"] = Parameter(torch.ones(24, 12, dtype=torch.bfloat16))
    optimizer = kernel.Muon(params.items(), lr=torch.tensor(0.02))
    take_steps(optimizer, params, [0])
    before, state = copy.deepcopy(params), copy.deepcopy(state_of(optimizer, params))
    groups, metrics = copy.deepcopy(optimizer.state_dict()["param_groups"]), optimizer.metrics()
    told = []
    optimizer.warmup(lambda *progress: told.append(progress))
    assert [done for done, _, _ in told] == list(range(1, len(told) + 1)) and {total for _, total, _ in told} == {
        len(told)
    }
    compiled = [what for _, _, what in told if re.match(r"\d+ x \d+ x \d+ (standard|gram)", what)]
    assert sum("24 x 12" in what for what in compiled) >= 1 and sum("12 x 24" in what for what in compiled) == 1
    assert same_bits(params, before) and same_bits(state_of(optimizer, params), state)
    assert optimizer.state_dict()["param_groups"] == groups and optimizer.metrics() == metrics
    assert not capsys.readouterr().out


def test_warmup_prints_a_line_for_each_kernel_by_default(kernel, capsys):
    optimizer = kernel.Muon(named_parameters().items(), ns_dtype="float64")
    optimizer.warmup()
    assert capsys.readouterr().out.splitlines() == [
        "warm-up 1/2: 1 x 24 x 12 standard torch.mm float64",
        "warm-up 2/2: 1 x 12 x 24 standard torch.mm float64",
    ]


def test_warmup_works_without_matrices(kernel):
    kernel.Muon([Parameter(torch.ones(3))]).warmup()


def test_explain_says_what_runs(kernel):
    params = named_parameters()
    rows = {row.name: row for row in kernel.Muon(params.items(), ns_dtype="float64").explain().rows}
    assert rows["up.weight"].kernel == "standard torch.mm float64" and rows["up.weight"].matrices == 1
    assert rows["up.weight"].multiplier == pytest.approx(0.2 * 24**0.5)
    assert (rows["up.bias"].branch, rows["up.bias"].kernel, rows["up.bias"].multiplier) == (
        "adamw", "torch._fused_adamw_", None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype, size", [(torch.float32, 1e30), (torch.bfloat16, 1e30), (torch.float16, 6e4)])
def test_norms_of_large_gradients_are_finite_and_as_exact_as_of_small_ones(kernel, dtype, size):
    """96 entries of one size have a norm of sqrt(96) times it; 96 additions in float64 err by at most 96 * 1.1e-16."""
    params = {"up.weight": Parameter(torch.ones(8, 12, dtype=dtype)), "up.bias": Parameter(torch.ones(96, dtype=dtype))}
    optimizer = kernel.Muon(params.items())
    for p in params.values():
        p.grad = torch.full_like(p, size)
    optimizer.step()
    metrics, entry = optimizer.metrics(), params["up.bias"].grad[0].double()
    for key in ("muon_gradient_norm", "fallback_gradient_norm"):
        torch.testing.assert_close(metrics[key], 96**0.5 * entry, rtol=2e-14, atol=0)
