"""Groups: how they split, what they may set, and which parameters are refused."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.small_model import matrix, named_parameters

pytestmark = pytest.mark.kernels_ci


def test_mixed_group_splits_into_two_of_one_lr_with_a_factor(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02, adamw_lr=0.003)
    muon, adamw = optimizer.param_groups
    keys = "use_muon", "lr", "lr_factor"
    assert [muon[key] for key in keys] == [True, 0.02, 1.0] and muon["param_names"] == ["up.weight", "down.weight"]
    assert [adamw[key] for key in keys] == [False, 0.02, 0.003 / 0.02]
    assert adamw["param_names"] == ["wte.weight", "up.bias", "norm.weight"]


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
    keys = "use_muon", "lr", "lr_factor", "ns_steps", "param_names"
    settings = [tuple(group[key] for key in keys) for group in optimizer.param_groups]
    assert settings == [
        (True, 0.1, 1.0, 3, ["wte.weight"]),
        (False, 0.5, 1.0, 5, ["up.weight"]),
        (True, 0.1, 1.0, 5, ["param_2"]),
        (False, 0.1, 2.0, 5, ["param_3"]),
    ]
    assert [row.reason for row in optimizer.explain().rows] == ["use_muon", "use_muon", "matrix", "insufficient_dims"]


def test_group_can_set_its_own_conv_mode_and_experts(kernel):
    conv, experts = (Parameter(torch.zeros(shape)) for shape in ((8, 4, 3, 3), (5, 8, 12)))
    optimizer = kernel.Muon(
        [
            {"params": [("conv.weight", conv)], "conv_mode": "batched"},
            {"params": [("moe.experts.w", experts)], "expert_keys": ["experts"]},
        ]
    )
    assert [(row.matrices, row.reason) for row in optimizer.explain().rows] == [
        (9, "matrix: 9 matrices 8x4"),
        (5, "matrix: 5 matrices 8x12"),
    ]


def test_groups_differing_in_lr_and_decay_step_independently(kernel):
    """They share a batch all the same: see test_groups_with_equal_recipes_share_a_batch."""
    settings = [dict(lr=0.1, weight_decay=0.0), dict(lr=torch.tensor(0.02), weight_decay=0.5), dict(lr=0.0)]
    together = [{"params": [(f"{i}.weight", Parameter(matrix(16, 16, i)))], **args} for i, args in enumerate(settings)]
    alone = [[(f"{i}.weight", Parameter(matrix(16, 16, i)))] for i in range(3)]
    optimizers = [kernel.Muon(together), *(kernel.Muon(pair, **args) for pair, args in zip(alone, settings))]
    for seed in range(2):
        for i, group in enumerate([*(group["params"] for group in together), *alone]):
            group[0][1].grad = matrix(16, 16, 10 * seed + i % 3)
        for optimizer in optimizers:
            optimizer.step()
    for group, pair in zip(together, alone):
        assert torch.equal(group["params"][0][1], pair[0][1])


def test_tied_parameter_is_optimized_once(kernel):
    tied = Parameter(torch.ones(16, 8))
    up = Parameter(torch.ones(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # with names it is no mistake
        optimizer = kernel.Muon([("decoder.weight", tied), ("wte.weight", tied), ("up.weight", up)])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    assert optimizer.param_groups[1]["param_names"] == ["decoder.weight"]
    assert [row.reason for row in optimizer.explain().rows] == ["matrix", "output_head:decoder"]


def test_unnamed_parameters_get_distinct_names(kernel):
    params = list(named_parameters().values())
    optimizer = kernel.Muon(params[:3])
    optimizer.add_param_group({"params": params[3:4]})
    optimizer.add_param_group({"params": [["last", params[4]]]})
    optimizer.add_param_group({"params": []})
    assert sorted(row.name for row in optimizer.explain().rows) == ["last", "param_0", "param_1", "param_2", "param_3"]
    assert [row.name for row in kernel.route(params[:3]).rows] == ["param_0", "param_1", "param_2"]


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: [], ValueError, "empty"),
        (lambda: {Parameter(torch.ones(2))}, TypeError, "order"),
        (lambda: [Parameter(torch.ones(4, 4, dtype=torch.complex64))], TypeError, "complex64"),
        (lambda: [torch.ones(4, 4, requires_grad=True) * 2], ValueError, "non-leaf"),
        (lambda: [{"params": [Parameter(torch.ones(4))], "use_muon": True}], ValueError, r"its shape is \(4,\)"),
        (lambda: [{"params": [("a", Parameter(torch.ones(4)))]}, {"params": ["b"]}], TypeError, "str at position 0"),
    ],
    ids=["nothing", "a set", "complex", "not a leaf", "a vector for Muon", "a string"],
)
def test_wrong_parameters_are_named(kernel, make, error, words):
    params = make()
    if isinstance(params, set):
        params = [{"params": params}]
    with pytest.raises(error, match=words):
        kernel.Muon(params)


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


def test_vector_in_a_group_of_matrices_raises(kernel):
    optimizer = kernel.Muon(named_parameters().items())
    optimizer.param_groups[0]["params"][0] = Parameter(torch.ones(24 * 12))
    with pytest.raises(ValueError, match=r"up.weight, which is not a matrix: its shape is \(288,\)"):
        optimizer.step()


def test_parameter_appended_to_a_group_is_explained(kernel):
    optimizer = kernel.Muon(named_parameters().items())
    optimizer.param_groups[0]["params"].append(Parameter(torch.ones(8, 8)))
    assert len(optimizer.explain().rows) == len(named_parameters()) + 1


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("learning_rate", 0.1, r"has no 'learning_rate': write lr\."),
        ("weight_decy", 0.1, "has no 'weight_decy': did you mean 'weight_decay'"),
        ("use_moun", True, "has no 'use_moun': did you mean 'use_muon'"),
        ("is_muon", True, r"has no 'is_muon': write use_muon in the group, or is_muon in Muon\(...\)\."),
        ("adamw_beta", (0.9, 0.95), "did you mean 'adamw_betas'"),
        ("lr_muon", 0.1, r"has no 'lr_muon': write lr\."),
        ("rank", 4, "has no 'rank': it has .*weight_decay"),  # resembles reason
        ("qqqqq", 1, "has no 'qqqqq': it has .*weight_decay.* A key of your own begins with an underscore"),
        ("amsgrad", True, "amsgrad=True in a parameter group is not supported"),
        ("decoupled_weight_decay", False, "decoupled_weight_decay=False in a parameter group is not supported: weight"),
        ("backend", "svd", "backend='svd' in a parameter group is not supported: leave it out"),
    ],
)
def test_a_key_that_nobody_reads_raises_with_the_nearest(kernel, key, value, words):
    optimizer = kernel.Muon(named_parameters().items())
    for make in (lambda group: kernel.Muon([group]), optimizer.add_param_group):
        with pytest.raises(ValueError, match=words):
            make({"params": [("new.weight", Parameter(torch.ones(8, 8)))], key: value})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_parameter_that_is_appended_a_second_time_is_refused(kernel, number):
    optimizer = kernel.Muon(named_parameters().items())
    first = optimizer.param_groups[0]
    optimizer.param_groups[number]["params"].append(first["params"][0])
    with pytest.raises(
        ValueError, match=f"is a parameter that the optimizer already has, as {first['param_names'][0]}"
    ):
        optimizer.step()


def test_keys_that_others_write_and_ones_own_stay(kernel):
    """Also those that come into live groups later, and with a state."""
    others = dict(initial_lr=0.1, max_lr=0.2, swa_lr=0.3, lr_scale=0.5, lr_mult=1.0, name="body", amsgrad=False)
    others.update(
        lr_multiplier=0.5, wd_multiplier=0.0, is_last_layer=False, param_group="bias", rho=0.05, adaptive=True
    )
    others.update(decoupled_weight_decay=False, weight_decay=0.0)  # as Adam writes it where it means nothing
    params = named_parameters()
    optimizer = kernel.Muon([{"params": params.items(), **others, "_mine": 7}])
    for group in optimizer.param_groups:
        assert {key: group[key] for key in others} == others and group["_mine"] == 7
        group["somebodys"] = 1
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(group["somebodys"] == 1 for group in optimizer.param_groups)
    with pytest.raises(ValueError, match="has no 'somebodys'"):
        kernel.Muon(optimizer.param_groups)


@pytest.mark.parametrize(
    "key, words",
    [
        ("weight_deacy", "did you mean 'weight_decay'"),
        ("nesterow", "did you mean 'nesterov'"),
        ("wd", "weight_decay"),
        ("release_grads", r"write it in Muon\(...\)"),
        ("is_muon", "write use_muon in the group"),
    ],
)
def test_a_misspelt_key_that_comes_into_a_live_group_is_warned_of_once(kernel, key, words):
    """Schedulers write keys of theirs, so it is no error."""
    optimizer = kernel.Muon(named_parameters().items())
    optimizer.step()
    optimizer.param_groups[0].update({key: 0.5, "max_weight_decay": 0.5, "_weight_deacy": 0.5})
    with pytest.warns(UserWarning, match=f"the key '{key}' of a parameter group does nothing: .*{words}") as caught:
        optimizer.step()
    optimizer.step()
    assert len(caught) == 1


def test_groups_of_torchs_own_optimizers_are_taken_as_they_are(kernel):
    for make, key in ((torch.optim.AdamW, "norm.weight"), (torch.optim.Muon, "up.weight")):
        groups = make([named_parameters()[key]], lr=0.1).param_groups
        torch.optim.lr_scheduler.OneCycleLR(make(groups), max_lr=0.1, total_steps=5)
        (group,) = kernel.Muon(groups).param_groups
        assert group["max_lr"] == 0.1
