"""Groups: how they split, what they may set, what schedulers do with them, and what is refused."""

import copy

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters

pytestmark = pytest.mark.kernels_ci


def test_mixed_group_splits_into_two_with_own_learning_rates(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02, adamw_lr=0.003)
    muon, adamw = optimizer.param_groups
    assert (muon["use_muon"], muon["param_names"], muon["lr"]) == (True, ["up.weight", "down.weight"], 0.02)
    assert (adamw["use_muon"], adamw["lr"]) == (False, 0.003)
    assert adamw["param_names"] == ["wte.weight", "up.bias", "norm.weight"]


def test_scheduler_scales_both_learning_rates(kernel):
    optimizer = kernel.Muon(named_parameters().items(), lr=0.02, adamw_lr=0.004)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.002]


def test_one_cycle_sets_momentum(kernel):
    optimizer = kernel.Muon(named_parameters().items())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, base_momentum=0.8, max_momentum=0.9)
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_groups_override_settings_and_routing(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(
        [
            {"params": [("wte.weight", params["wte.weight"])], "use_muon": True, "ns_steps": 3},
            {"params": [("up.weight", params["up.weight"])], "use_fallback": True, "lr": 0.5},
            {"params": [params["down.weight"], params["norm.weight"]], "weight_decay": 0.0},
        ],
        lr=0.1,
        adamw_lr=0.2,
    )
    keys = "use_muon", "lr", "ns_steps", "param_names"
    found = [tuple(group[key] for key in keys) for group in optimizer.param_groups]
    assert found == [
        (True, 0.1, 3, ["wte.weight"]),
        (False, 0.5, 5, ["up.weight"]),
        (True, 0.1, 5, ["param_2"]),
        (False, 0.2, 5, ["param_3"]),
    ]
    assert [row.reason for row in optimizer.explain().rows] == ["use_muon", "use_muon", "matrix", "insufficient_dims"]


def test_explain_says_what_runs(kernel):
    params = named_parameters()
    rows = {row.name: row for row in kernel.Muon(params.items(), ns_dtype="float32").explain().rows}
    assert rows["up.weight"].kernel == "standard torch.mm float32" and rows["up.weight"].matrices == 1
    assert rows["up.weight"].multiplier == pytest.approx(0.2 * 24**0.5)
    assert (rows["up.bias"].branch, rows["up.bias"].kernel, rows["up.bias"].multiplier) == (
        "adamw", "torch._fused_adamw_", None,
    )  # fmt: skip


def test_tied_parameter_is_optimized_once(kernel):
    tied = Parameter(torch.ones(16, 8))
    up = Parameter(torch.ones(8, 8))
    optimizer = kernel.Muon([("decoder.weight", tied), ("wte.weight", tied), ("up.weight", up)])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    assert optimizer.param_groups[1]["param_names"] == ["decoder.weight"]
    assert [row.reason for row in optimizer.explain().rows] == ["matrix", "output_head:decoder"]


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(lr=-1.0), ValueError, "lr must be at least 0"),
        (dict(lr=torch.zeros(2)), ValueError, "lr must be a number or a float32 or float64 tensor of one element"),
        (dict(lr="fast"), TypeError, "lr must be a number"),
        (dict(weight_decay=-0.1), ValueError, "weight_decay"),
        (dict(momentum=1.0), ValueError, "momentum must be at least 0 and below 1"),
        (dict(adamw_betas=(0.9,)), ValueError, "adamw_betas must be two numbers"),
        (dict(adamw_betas=(0.9, 1.0)), ValueError, "adamw_betas"),
        (dict(eps=float("nan")), ValueError, "eps"),
        (dict(ns_steps=0), ValueError, "ns_steps must be at least 1"),
        (dict(ns_coefficients="cubic"), ValueError, "cubic"),
        (dict(adjust_lr_fn="rms"), ValueError, "adjust_lr_fn 'rms' is none of"),
        (dict(ns_dtype="int8"), ValueError, "int8"),
        (dict(ns_dtype="half precision"), ValueError, "half precision"),
        (dict(foreach=True), TypeError, "foreach"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_wrong_settings_are_named(kernel, options, error, words):
    with pytest.raises(error, match=words):
        kernel.Muon(named_parameters().items(), **options)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: [], ValueError, "empty"),
        (lambda: {Parameter(torch.ones(2))}, TypeError, "order"),
        (lambda: [Parameter(torch.ones(4, 4, dtype=torch.complex64))], TypeError, "complex64"),
        (lambda: [torch.ones(4, 4, requires_grad=True) * 2], ValueError, "non-leaf"),
        (lambda: [{"params": [Parameter(torch.ones(4))], "use_muon": True}], ValueError, r"its shape is \(4,\)"),
        (lambda: [{"params": [("a", Parameter(torch.ones(4)))]}, {"params": ["b"]}], TypeError, "got str"),
    ],
    ids=["nothing", "a set", "complex", "not a leaf", "a vector for Muon", "a string"],
)
def test_wrong_parameters_are_named(kernel, make, error, words):
    params = make()
    if isinstance(params, set):
        params = [{"params": params}]
    with pytest.raises(error, match=words):
        kernel.Muon(params)


def test_refused_group_leaves_the_optimizer_unchanged(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    before = copy.deepcopy(optimizer.state_dict())
    fresh = [("a.weight", Parameter(torch.ones(8, 8))), ("up.bias", params["up.bias"])]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": fresh})
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]


def test_group_without_a_possible_plan_leaves_no_state(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    before = copy.deepcopy(optimizer.state_dict())
    fresh = [("a.weight", Parameter(torch.ones(8, 64))), ("a.bias", Parameter(torch.ones(8)))]
    with pytest.raises(ValueError, match="gram"):
        optimizer.add_param_group({"params": fresh, "ns_method": "gram", "ns_dtype": "bfloat16"})
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"] and after["state"].keys() == before["state"].keys()
