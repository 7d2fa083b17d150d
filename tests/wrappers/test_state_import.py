"""After an import the next step is the one that the other optimizer would have taken."""

import copy
import io
import math

import pytest
import torch
from torch.nn import Parameter

from tests.support.published_muons import (
    CASES,
    MATRICES,
    REST,
    dion_case,
    fresh,
    keller_jordan_case,
    moonlight_case,
    timm_case,
    torch_case,
)
from tests.support.small_model import STATE, named_parameters, same_bits, take_steps

pytestmark = pytest.mark.kernels_ci


def snapshot(optimizer):
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("case", CASES)
def test_next_step_is_that_of_the_source(kernel, case):
    reference, state_dict, source, others, options = CASES[case]()
    params, optimizer = fresh(kernel, nesterov=not reference.nesterov, **options)
    kernel.import_state(optimizer, state_dict, source, **others)
    check_next_step(optimizer, params, reference)


def check_next_step(optimizer, params, reference):
    before = {name: p.detach().clone() for name, p in params.items()}
    generator = torch.Generator().manual_seed(4)
    for p in params.values():
        p.grad = 1e8 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    optimizer.step()
    for name, p in params.items():
        step = reference.matrix_step if name in MATRICES else reference.other_step
        expected = step(name, before[name], p.grad)
        # The iteration multiplies roundings of 1e-16 by less than 1e3; eps is 1e-7 of norms above 1e8.
        assert (p - expected).norm() <= 1e-11 * (expected - before[name]).norm(), name


@pytest.mark.parametrize(
    "case, eps",
    [
        ("torch", 1e-7),
        ("timm with a safety factor", 1e-7 / 1.02),  # the norm is multiplied with it first
        ("keller_jordan", 1e-7),
        ("motif", 1e-8),  # of the average, a tenth of the sum
        ("moonlight", 0.05 * 1e-7),
        ("dion", 0.05 * 1e-8),
        ("dion with second moments", 0.05 * 1e-8),
    ],
)
def test_imported_eps_bounds_the_norm_of_the_average(kernel, case, eps):
    _, state_dict, source, others, _ = CASES[case]()
    _, optimizer = fresh(kernel)
    kernel.import_state(optimizer, state_dict, source, **others)
    assert optimizer.param_groups[0]["eps"] == pytest.approx(eps, rel=1e-12)


def test_adamw_eps_of_moonlight_counts_more_there_by_what_the_bias_is_corrected_with(kernel):
    reference, state_dict, source, _, _ = moonlight_case()
    *others, _ = reference.rest
    reference.rest = (*others, 1e8)  # as large as the gradients
    state_dict["param_groups"][0]["adamw_eps"] = 1e8
    params, optimizer = fresh(kernel)
    kernel.import_state(optimizer, state_dict, source)
    assert optimizer.param_groups[1]["adamw_eps"] == 1e8
    optimizer.param_groups[1]["adamw_eps"] /= math.sqrt(1 - 0.95 ** (reference.steps + 1))
    check_next_step(optimizer, params, reference)


def test_group_flags_are_imported(kernel):
    _, muon, source, others, _ = torch_case()
    others["adamw_state_dict"]["param_groups"][0]["maximize"] = True
    _, optimizer = fresh(kernel)
    kernel.import_state(optimizer, muon, source, **others)
    assert [group["maximize"] for group in optimizer.param_groups] == [False, True]
    _, state_dict, source, _, _ = dion_case()
    state_dict["param_groups"][0]["flatten"] = True
    kernel.import_state(optimizer, state_dict, source)
    assert optimizer.param_groups[0]["conv_mode"] == "flatten"


def test_groups_name_the_branch_of_unrouted_timm_parameters(kernel):
    _, state_dict, source, _, _ = timm_case()
    (group,) = state_dict["param_groups"]
    groups = [{**group, "params": [1, 3], "use_muon": True}, {**group, "params": [0, 2, 4], "use_fallback": True}]
    params, optimizer = fresh(kernel)
    take_steps(optimizer, params, [0])
    kernel.import_state(optimizer, {"state": {}, "param_groups": groups}, source)
    assert not any(value.any() for state in optimizer.state_dict()["state"].values() for value in state.values())


def test_next_step_is_that_of_torchs_own_optimizers(kernel, monkeypatch):
    def orthogonalize(G, coefficients, steps, eps):
        return kernel.orthogonalize(G, [coefficients], steps, dtype=torch.float64, eps=eps)

    # Theirs works in bfloat16.
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", orthogonalize)
    params = named_parameters(torch.float64)
    muon = torch.optim.Muon([params[name] for name in MATRICES], lr=0.02)
    adamw = torch.optim.AdamW([params[name] for name in REST], lr=0.003, weight_decay=0.2)
    for seed in range(3):
        take_steps(muon, params, [seed])
        adamw.step()
    params_here, optimizer = fresh(kernel, {name: Parameter(p.detach().clone()) for name, p in params.items()})
    notes = kernel.import_state(optimizer, muon.state_dict(), adamw_state_dict=adamw.state_dict())
    assert notes == []
    take_steps(muon, params, [3])
    adamw.step()
    take_steps(optimizer, params_here, [3])
    for name, p in params.items():
        torch.testing.assert_close(params_here[name], p, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", ["torch", "keller_jordan of matrices alone"])
def test_a_muon_of_matrices_alone_leaves_other_parameters_unchanged(kernel, case):
    _, muon, source, _, _ = CASES[case]()
    params, optimizer = fresh(kernel)
    take_steps(optimizer, params, [0])
    before = snapshot(optimizer)
    notes = kernel.import_state(optimizer, muon, source)
    assert any(note.startswith("AdamW's parameters, wte.weight, ") for note in notes)
    after = optimizer.state_dict()
    assert after["param_groups"][1] == before["param_groups"][1] and after["param_groups"][0]["lr"] == 0.02
    for i in (2, 3, 4):
        assert all(torch.equal(after["state"][i][key], value) for key, value in before["state"][i].items())


def renamed(state_dict, how):
    """A timm state dict in another order, with names in one of the places where they may be."""
    order = ["norm.weight", "down.weight", "wte.weight", "up.weight", "up.bias"]
    (group,) = state_dict["param_groups"]
    positions = [list(named_parameters()).index(name) for name in order]
    state = {i: state_dict["state"][position] for i, position in enumerate(positions)}
    if how == "param_names":
        return {"state": state, "param_groups": [{**group, "param_names": [f"module.{name}" for name in order]}]}, {}
    if how == "keys":  # as distributed checkpoints have them
        return {"state": dict(zip(order, state.values())), "param_groups": [{**group, "params": order}]}, {}
    return {"state": state, "param_groups": [group]}, dict(names=order)


@pytest.mark.parametrize("how", ["param_names", "keys", "argument"])
def test_names_find_their_parameters_in_any_order(kernel, how):
    reference, state_dict, source, _, _ = timm_case()
    params, optimizer = fresh(kernel)
    named_dict, others = renamed(state_dict, how)
    kernel.import_state(optimizer, named_dict, source, **others)
    for name, p in params.items():
        key = "momentum_buffer" if name in MATRICES else "exp_avg"
        assert torch.equal(optimizer.state[p][key], reference.state[name][0])


def test_matrices_sorted_by_keller_jordan_are_found(kernel):
    shapes = {"a.weight": (8, 4), "b.weight": (12, 4), "c.weight": (8, 4), "d.weight": (8, 6)}
    params = {name: Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    sorted_names = ["b.weight", "d.weight", "a.weight", "c.weight"]
    state = {i: {"momentum_buffer": torch.full(shapes[name], i + 1.0)} for i, name in enumerate(sorted_names)}
    group = dict(params=[0, 1, 2, 3], lr=0.02, momentum=0.95, weight_decay=0.0, use_muon=True)
    _, optimizer = fresh(kernel, params)
    kernel.import_state(optimizer, {"state": state, "param_groups": [group]}, "keller_jordan")
    means = {name: optimizer.state[p]["momentum_buffer"].mean().item() for name, p in params.items()}
    assert means == {"b.weight": 1, "d.weight": 2, "a.weight": 3, "c.weight": 4}


@pytest.mark.parametrize("flatten, conv_mode", [(True, "flatten"), (False, "batched")])
def test_dions_flatten_is_a_way_to_see_convolutions(kernel, flatten, conv_mode):
    """Without it a file says nothing of convolutions."""
    _, state_dict, source, _, _ = dion_case()
    for group in state_dict["param_groups"]:
        group["flatten"] = flatten
    _, optimizer = fresh(kernel, conv_mode="batched")
    kernel.import_state(optimizer, state_dict, source)
    assert optimizer.param_groups[0]["conv_mode"] == conv_mode


def test_dions_count_of_a_parameter_comes_before_that_of_its_group(kernel):
    """Files have both since July 2026, and a parameter that got no gradient in some steps has counted fewer of them."""
    _, state_dict, source, _, _ = dion_case()
    counts = {"wte.weight": 3, "up.bias": 0, "norm.weight": 5}
    for i, count in zip((2, 3, 4), counts.values()):
        state_dict["state"][i]["step_dev"] = torch.tensor(float(count))
    params, optimizer = fresh(kernel)
    kernel.import_state(optimizer, state_dict, source)
    assert {name: optimizer.state[params[name]]["step"].item() for name in REST} == counts


def test_dions_cautious_decay_is_a_way_to_decay(kernel):
    """An independent decay of this optimizer stays, as its size means something else."""
    for kept, expected in (("decoupled", "cautious"), ("independent", "independent"), ("corrected", "cautious")):
        _, state_dict, source, _, _ = dion_case()
        for group in state_dict["param_groups"]:
            group["cautious_wd"] = True
        _, optimizer = fresh(kernel, decay_mode=kept)
        notes = kernel.import_state(optimizer, state_dict, source)
        assert [group["decay_mode"] for group in optimizer.param_groups] == [expected] * 2
        assert any("decay_mode='cautious' of the source is not taken" in note for note in notes) == (kept == expected)
        assert not any("decay_lr" in note for note in notes)  # by which only a corrected decay is measured


def test_dions_split_sizes_are_split_rows(kernel):
    _, state_dict, source, _, _ = dion_case()
    muon, rest = state_dict["param_groups"]
    fused = {**muon, "params": [0], "split_sizes": [8, 16]}
    params = named_parameters(torch.float64)
    pairs = list(params.items())
    optimizer = kernel.Muon([{"params": pairs[1:2]}, {"params": [pairs[0], *pairs[2:]]}])
    assert optimizer.param_groups[0]["param_names"] == ["up.weight"]
    file = {**state_dict, "param_groups": [fused, {**muon, "params": [1]}, rest]}
    kernel.import_state(optimizer, file, source, names=[*MATRICES, *REST])
    assert [group["split_rows"] for group in optimizer.param_groups[:2]] == [(8, 16), None]


def test_imported_state_is_a_complete_copy(kernel):
    """It can be saved and read with weights_only."""
    _, state_dict, source, _, _ = keller_jordan_case()
    original = copy.deepcopy(state_dict)
    params, optimizer = fresh(kernel)
    kernel.import_state(optimizer, state_dict, source)
    assert all(set(optimizer.state[p]) == STATE[name in MATRICES] for name, p in params.items())
    take_steps(optimizer, params, [0])
    for i, state in original["state"].items():
        assert all(
            torch.equal(torch.as_tensor(state_dict["state"][i][key]), torch.as_tensor(state[key])) for key in state
        )
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others, resumed = fresh(kernel, {name: Parameter(p.detach().clone()) for name, p in params.items()})
    resumed.load_state_dict(torch.load(file, weights_only=True))
    take_steps(optimizer, params, [1])
    take_steps(resumed, others, [1])
    assert same_bits(params, others)


def test_an_import_keeps_the_lower_halves_of_loaded_master_weights(kernel):
    params = named_parameters()
    source = torch.optim.AdamW(params.items())
    take_steps(source, params, [0])
    exact = {name: p.detach().clone() for name, p in params.items()}
    halves = {name: Parameter(p.detach().bfloat16()) for name, p in params.items()}
    optimizer = kernel.Muon(halves.items(), master_weights="split")
    optimizer.load_master_weights(exact)
    kernel.import_state(optimizer, source.state_dict(), "adamw")
    masters = optimizer.master_weights()
    assert all(torch.equal(masters[name], exact[name]) for name in exact)
