"""State: there from the start, exact through files and copies, and in line with the parameters of the moment."""

import copy
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

from tests.support.small_model import STATE, named_parameters, same_bits, serialized, set_gradients, take_steps

pytestmark = pytest.mark.kernels_ci


def test_state_exists_from_the_start(kernel):
    """It is zero, with the same keys for all parameters of a branch."""
    optimizer = kernel.Muon(named_parameters().items())
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            assert set(state) == STATE[group["use_muon"]]
            assert all(not value.any() for value in state.values())


@pytest.mark.parametrize("split", [0, 1, 3])
def test_run_resumed_from_a_file_continues_bit_for_bit(kernel, split):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02, ns_dtype=torch.bfloat16, ns_coefficients=[(2, -1.5, 0.5)])
    take_steps(optimizer, params, range(split))
    resumed = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    other = kernel.Muon(resumed.items(), lr=1.0)
    other.load_state_dict(serialized(optimizer.state_dict()))
    take_steps(optimizer, params, range(split, 5))
    take_steps(other, resumed, range(split, 5))
    assert same_bits(params, resumed)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_continue_bit_for_bit_with_their_settings(kernel, duplicate):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02, adamw_lr=0.005)
    take_steps(optimizer, params, range(2))
    other, others = duplicate((optimizer, params))
    take_steps(optimizer, params, range(2, 4))
    take_steps(other, others, range(2, 4))
    assert same_bits(params, others)
    fresh = [("new.weight", Parameter(torch.zeros(8, 8))), ("new.bias", Parameter(torch.zeros(8)))]
    other.add_param_group({"params": fresh})
    assert [other.param_groups[-1][key] for key in ("lr", "lr_factor")] == [0.02, 0.25]


def test_distributed_state_dict_round_trip_is_exact(kernel):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    twin = copy.deepcopy(model)
    optimizer = kernel.Muon(model.named_parameters(), lr=0.02)
    take_steps(optimizer, dict(model.named_parameters()), [0])
    twin.load_state_dict(model.state_dict())
    other = kernel.Muon(twin.named_parameters())
    set_optimizer_state_dict(twin, other, get_optimizer_state_dict(model, optimizer))
    take_steps(optimizer, dict(model.named_parameters()), [1])
    take_steps(other, dict(twin.named_parameters()), [1])
    assert same_bits(model.state_dict(), twin.state_dict())


def test_state_of_torchs_muon_loads(kernel):
    p, q = (Parameter(torch.ones(8, 12)) for _ in range(2))
    theirs = torch.optim.Muon([p], lr=0.1)
    p.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    theirs.step()
    ours = kernel.Muon([q])
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.state[q]["momentum_buffer"], theirs.state[p]["momentum_buffer"])
    assert ours.param_groups[0]["lr"] == 0.1 and ours.param_groups[0]["use_muon"]


def test_frozen_parameters_have_no_state_until_trained(kernel):
    params = named_parameters()
    params["up.weight"].requires_grad_(False)
    optimizer = kernel.Muon(params.items())
    assert params["up.weight"] not in optimizer.state
    params["up.weight"].requires_grad_(True)
    take_steps(optimizer, params, [0])
    assert set(optimizer.state[params["up.weight"]]) == STATE[True]


def test_frozen_parameter_with_a_gradient_is_updated(kernel):
    """As torch's optimizers do."""
    params = named_parameters()
    params["up.weight"].requires_grad_(False)
    optimizer = kernel.Muon(params.items())
    before = params["up.weight"].clone()
    take_steps(optimizer, params, [0])
    assert not torch.equal(params["up.weight"], before)
    assert set(optimizer.state[params["up.weight"]]) == STATE[True]


def test_meta_parameters_get_state_once_they_are_real(kernel):
    params = {name: Parameter(p.detach().to("meta")) for name, p in named_parameters().items()}
    optimizer = kernel.Muon(params.items())
    assert not optimizer.state
    for group in optimizer.param_groups:
        group["params"] = [Parameter(torch.ones(p.shape)) for p in group["params"]]
    optimizer.state_dict()
    assert len(optimizer.state) == len(params)


def test_replaced_parameters_get_new_state(kernel):
    """Stale state goes. Wrappers that shard or cast a model rewrite the groups after construction."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    old = params["up.weight"]
    params["up.weight"] = Parameter(torch.ones(24, 12))
    optimizer.param_groups[0]["params"][0] = params["up.weight"]
    take_steps(optimizer, params, [0])
    assert old not in optimizer.state
    assert set(optimizer.state[params["up.weight"]]) == STATE[True]
    assert len(optimizer.state_dict()["state"]) == len(params)


@pytest.mark.parametrize("name", ["up.weight", "wte.weight"])
def test_parameter_with_a_changed_shape_is_refused(kernel, name):
    """It is refused before anything moves. torch's fused AdamW would read and write past the end of the old state."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    params[name].data = torch.cat([params[name].data, params[name].data])
    set_gradients(params, 1)
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match="its parameter"):
        optimizer.step()
    assert same_bits(params, before)


def test_state_of_other_parameters_is_refused(kernel):
    """It is refused before anything is loaded."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [1])
    saved = optimizer.state_dict()
    branches = ["wte.weight", "up.bias", "norm.weight"], ["up.weight", "down.weight"]
    swapped = kernel.Muon([{"params": [(name, params[name]) for name in names]} for names in branches])
    with pytest.raises(ValueError, match=r"2 groups of 2, 3 parameters, .* 2 groups of 3, 2 .*: call import_state"):
        swapped.load_state_dict(saved)
    reordered = {name: params[name] for name in ("wte.weight", "down.weight", "up.bias", "up.weight", "norm.weight")}
    other = kernel.Muon(reordered.items())
    with pytest.raises(ValueError, match="saved in another order"):
        other.load_state_dict(saved)
    assert not other.state[params["up.weight"]]["momentum_buffer"].any()


@pytest.mark.parametrize(
    "saved, words", [(3, "saved in format 3, this version knows 1 to 2"), ("1", "format 1, this version knows")]
)
def test_state_of_an_unknown_format_is_refused(kernel, saved, words):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    assert all(group["state_format"] == 2 for group in optimizer.state_dict()["param_groups"])
    later = copy.deepcopy(optimizer.state_dict())
    later["param_groups"][0]["state_format"] = saved
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(later)


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


def saved_before_stacked(optimizer, expert_keys=()):
    """A file as those are that know no `stacked`: what `expert_keys` does not name is one matrix, or a convolution."""
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["expert_keys"] = expert_keys
        del group["stacked"], group["sequence_lengths"]
    return saved


def test_a_stack_that_was_saved_as_one_matrix_is_refused_or_goes_on_as_one(kernel):
    params = [("mlp.experts.w1", Parameter(torch.ones(4, 8, 12)))]
    saved = saved_before_stacked(kernel.Muon(params, lr=0.5))
    optimizer = kernel.Muon(params)
    words = r"experts\.w1 \(4, 8, 12\) was saved as flatten 4x96, and is 4 matrices 8x12 here: write stacked=False"
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    flat = kernel.Muon([{"params": params, "stacked": False}])
    flat.load_state_dict(saved)
    assert (flat.param_groups[0]["lr"], flat.explain().rows[0].matrices) == (0.5, 1)


def test_stacks_that_a_file_without_stacked_names_are_loaded(kernel):
    params = [("mlp.experts.w1", Parameter(torch.ones(4, 8, 12))), ("conv.weight", Parameter(torch.ones(8, 8, 3)))]
    optimizer = kernel.Muon(params)
    optimizer.load_state_dict(saved_before_stacked(kernel.Muon(params, lr=0.5), ("experts",)))
    assert [row.matrices for row in optimizer.explain().rows] == [4, 1]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_file_without_expert_keys_leaves_them_as_they_are_here(kernel):
    params = [("conv.weight", Parameter(torch.ones(8, 8, 3))), ("up.weight", Parameter(torch.ones(8, 12)))]
    optimizer = kernel.Muon(params)
    optimizer.load_state_dict(saved_before_stacked(optimizer))
    assert optimizer.param_groups[0]["expert_keys"] == ("experts",)


@pytest.mark.parametrize("spoil", ["foreign", "keys", "settings", "hook"])
def test_failed_load_changes_nothing(kernel, spoil):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02)
    take_steps(optimizer, params, [0])
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    if spoil == "foreign":
        adamw = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups])
        take_steps(adamw, params, [0])
        saved = adamw.state_dict()
    elif spoil == "keys":
        saved["state"][0]["exp_avg"] = saved["state"][0].pop("momentum_buffer")
    elif spoil == "settings":
        saved["param_groups"][1]["momentum"] = 5.0
    else:
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state_dict: state_dict["param_groups"][0].update(ns_steps=0)
        )
    with pytest.raises(ValueError):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for i, state in before["state"].items():
        assert all(torch.equal(after["state"][i][key], value) for key, value in state.items())
