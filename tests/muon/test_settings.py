"""Settings: each does what it says, whose learning rate wins, and what is stored is plain."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.small_model import named_parameters, same_bits, set_gradients, take_steps

pytestmark = pytest.mark.kernels_ci


def test_fallback_equals_torchs_fused_adamw(kernel):
    params, torchs = named_parameters(), named_parameters()
    settings = dict(lr=0.01, weight_decay=0.3)
    optimizer = kernel.Muon(
        params.items(), **settings, is_muon=lambda *_: False, adamw_betas=(0.8, 0.9), adamw_eps=1e-5
    )
    reference = torch.optim.AdamW(torchs.values(), **settings, betas=(0.8, 0.9), eps=1e-5, fused=True)
    take_steps(optimizer, params, range(3))
    take_steps(reference, torchs, range(3))
    assert same_bits(params, torchs)


def test_is_muon_is_asked_by_name_and_none_keeps_routing(kernel):
    verdicts = {"wte.weight": True, "down.weight": False}
    optimizer = kernel.Muon(named_parameters().items(), is_muon=lambda name, p: verdicts.get(name))
    found = {row.name: (row.branch, row.reason) for row in optimizer.explain().rows}
    assert found["wte.weight"] == ("muon", "is_muon") and found["down.weight"] == ("adamw", "is_muon")
    assert found["up.weight"] == ("muon", "matrix")


def test_eps_bounds_the_step_of_small_gradients(kernel):
    moved = []
    for eps in (0.0, 1.0):
        p = Parameter(torch.zeros(8, 8))
        optimizer = kernel.Muon([p], lr=1.0, eps=eps, momentum=0.0, ns_dtype="float32")
        p.grad = 1e-6 * torch.eye(8)
        optimizer.step()
        moved.append(p.detach().norm().item())
    # Without eps every singular value ends near 1; with it p is linear, its slope the product of the first triples.
    assert moved[0] > 1 and moved[1] < 1e-2


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1e30), (torch.float32, 1e-30), (torch.float64, 2.0**200)])
@pytest.mark.parametrize("work_dtype", ["float16", "bfloat16", "float32"])
def test_step_is_independent_of_the_gradients_scale(kernel, dtype, scale, work_dtype):
    results = []
    for factor in (1.0, scale):
        p = Parameter(torch.zeros(12, 20, dtype=dtype))
        optimizer = kernel.Muon([p], lr=1.0, eps=0.0, ns_dtype=work_dtype)
        p.grad = factor * torch.randn(12, 20, dtype=dtype, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        results.append(p.detach())
    # 1e30 is no power of two: the scaled gradient is rounded anew, and the iteration amplifies what that changes.
    gain = np.prod([a for a, _, _ in kernel.schedules.resolve_schedule("polar_express", 5)])
    atol = 0.2 * 20**0.5 * gain * torch.finfo(getattr(torch, work_dtype)).eps
    assert results[0].norm() > 1
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=min(atol, 0.5))


@pytest.mark.parametrize(
    "group, constructor, expected",
    [
        ({}, dict(lr=0.1), 0.1),
        ({}, dict(lr=0.1, adamw_lr=0.2), 0.2),
        ({"lr": 0.3}, dict(lr=0.1, adamw_lr=0.2), 0.3),
        ({"lr": 0.3, "adamw_lr": 0.4}, dict(lr=0.1, adamw_lr=0.2), 0.4),
        ({"use_muon": False}, dict(lr=0.1, adamw_lr=0.2), 0.2),
        ({"use_muon": False, "lr": 0.3}, dict(lr=0.1, adamw_lr=0.2), 0.3),
    ],
    ids=str,
)
def test_nearest_learning_rate_wins(kernel, group, constructor, expected):
    optimizer = kernel.Muon([{"params": [("norm.weight", Parameter(torch.ones(8)))], **group}], **constructor)
    assert optimizer.param_groups[0]["lr"] == expected


def test_given_group_dict_is_left_unchanged(kernel):
    group = {"params": list(named_parameters().items()), "lr": 1, "ns_coefficients": [[2.0, -1.5, 0.5]]}
    before = {**group, "params": list(group["params"]), "ns_coefficients": [[2.0, -1.5, 0.5]]}
    kernel.Muon([group])
    assert group == before


def test_stored_settings_are_plain_values(kernel):
    optimizer = kernel.Muon(
        named_parameters().items(),
        lr=np.float64(0.02),
        ns_coefficients=(triple for triple in [[2, -1.5, 0.5]]),
        ns_steps=np.int64(3),
        ns_dtype=torch.bfloat16,
        adamw_betas=[0.9, 0.95],
    )
    for values in (optimizer.defaults, *optimizer.param_groups):
        assert type(values["lr"]) is float and type(values["ns_steps"]) is int
        assert values["ns_coefficients"] == ((2.0, -1.5, 0.5),)
        assert (values["ns_dtype"], values["adamw_betas"]) == ("bfloat16", (0.9, 0.95))


@pytest.mark.parametrize("ns_dtype", ["float32", torch.float32])
def test_work_dtype_is_live(kernel, ns_dtype):
    params, others = named_parameters(), named_parameters()
    optimizer = kernel.Muon(params.items(), ns_dtype="bfloat16")
    for group in optimizer.param_groups:
        group["ns_dtype"] = ns_dtype
    take_steps(optimizer, params, [0])
    take_steps(kernel.Muon(others.items(), ns_dtype="float32"), others, [0])
    assert same_bits(params, others)


def test_unnamed_parameters_get_distinct_names(kernel):
    params = list(named_parameters().values())
    optimizer = kernel.Muon(params[:3])
    optimizer.add_param_group({"params": params[3:4]})
    optimizer.add_param_group({"params": [("last", params[4])]})
    optimizer.add_param_group({"params": []})
    assert sorted(row.name for row in optimizer.explain().rows) == ["last", "param_0", "param_1", "param_2", "param_3"]
    assert [row.name for row in kernel.route(params[:3]).rows] == ["param_0", "param_1", "param_2"]


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_default_device_does_not_matter(kernel, default):
    params = named_parameters()
    torch.set_default_device(default)
    try:
        optimizer = kernel.Muon(params.items())
        for p in params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert all(p.isfinite().all() for p in params.values())


@pytest.mark.parametrize(
    "group, error, words",
    [
        (dict(lr=None), TypeError, "lr must be a number, got None"),
        (dict(lr=True), TypeError, "lr must be a number, got True"),
        (dict(lr=torch.tensor(1.0, dtype=torch.bfloat16)), ValueError, "bfloat16"),
        (dict(nesterov="no"), TypeError, "nesterov must be True or False, got 'no'"),
        (dict(use_muon="no"), TypeError, "use_muon and use_fallback must be"),
        (dict(use_muon=True, use_fallback=True), ValueError, "contradict"),
        (dict(betas=(0.9, 0.99)), ValueError, "adamw_betas"),
        (dict(param_names=["a"]), ValueError, "1 param_names were given for 2 params"),
        (dict(param_names=["a", "a"]), ValueError, "two parameters are called a"),
        (dict(weight_decay="0.1"), TypeError, "weight_decay must be a number"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_group_settings_are_named(kernel, group, error, words):
    with pytest.raises(error, match=words):
        kernel.Muon([{"params": [Parameter(torch.ones(4, 4)), Parameter(torch.ones(4, 4))], **group}])


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: Parameter(torch.ones(4, 4)).to(torch.float8_e4m3fn), TypeError, "float8"),
        (lambda: torch.ones(4, 4).to_sparse().requires_grad_(), ValueError, "dense"),
    ],
    ids=["float8", "sparse"],
)
def test_unsupported_parameters_are_refused(kernel, make, error, words):
    with pytest.raises(error, match=words):
        kernel.Muon([make().detach().requires_grad_() if words == "float8" else make()])


def test_partial_parameters_are_refused(kernel):
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        part = DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
        with pytest.raises(ValueError, match=r"w has placements .* must be reduced before a step"):
            kernel.Muon([("w", Parameter(part))])
    finally:
        dist.destroy_process_group()


def test_settings_missing_from_a_state_dict_are_kept(kernel):
    """A dict from before a setting existed loads: what it lacks stays as it is here."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), ns_dtype="float32")
    set_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["ns_dtype"], group["use_muon"], group["param_names"]
    other = kernel.Muon(params.items(), ns_dtype="bfloat16", lr=0.5)
    other.load_state_dict(saved)
    assert [group["ns_dtype"] for group in other.param_groups] == ["bfloat16"] * 2
    assert [group["use_muon"] for group in other.param_groups] == [True, False]
    assert other.param_groups[0]["lr"] == 1e-3
