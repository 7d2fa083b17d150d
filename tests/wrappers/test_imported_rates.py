"""After an import each parameter moves by the rate that the source has for it, and so it does under a scheduler."""

import numpy as np
import pytest
import torch

from tests.support.imported_rates import (
    ADAMW,
    MUON,
    ROUNDED,
    SHARING,
    groups_by_hand,
    groups_with_rates,
    halves,
    halves_with_a_ratio,
    imported,
    rates,
    under_one_rate,
)
from tests.support.published_muons import MATRICES, REST, timm_case, torch_case
from tests.support.small_model import named_parameters


@pytest.mark.parametrize("make", [*SHARING, groups_with_rates])
@pytest.mark.parametrize("bases", [{}, {"initial_lr": [0.08, 0.009]}], ids=["constant", "in a schedule"])
def test_each_rate_is_the_sources_however_often_it_is_imported(kernel, make, bases):
    optimizer = make(kernel)
    for _ in range(2):
        notes = imported(kernel, optimizer, **bases)
        assert all("different places of a schedule" in note for note in notes)
        assert len(notes) == (1 if bases and make is not groups_with_rates else 0)
        assert rates(optimizer) == pytest.approx([MUON, ADAMW], **ROUNDED)


@pytest.mark.parametrize("make", SHARING)
def test_one_rate_for_all_keeps_the_sources_ratio(kernel, make):
    optimizer = make(kernel)
    imported(kernel, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [MUON, MUON]
    assert under_one_rate(optimizer, 0.01) == pytest.approx([0.01, 0.01 * ADAMW / MUON], **ROUNDED)


def test_groups_that_differ_in_decay_alone_share_the_rate(kernel):
    params = named_parameters()
    first = {"params": [(name, params[name]) for name in (*MATRICES, "wte.weight")]}
    second = {"params": [(name, params[name]) for name in ("up.bias", "norm.weight")], "weight_decay": 0.0}
    optimizer = kernel.Muon([first, second], lr=0.5)
    _, muon, source, others, _ = torch_case()
    kernel.import_state(optimizer, muon, source, **others)
    assert under_one_rate(optimizer, 0.01) == pytest.approx([0.01] + 2 * [0.01 * ADAMW / MUON], **ROUNDED)


def test_groups_with_rates_of_their_own_keep_them(kernel):
    optimizer = groups_with_rates(kernel)
    imported(kernel, optimizer)
    assert [(group["lr"], group["lr_factor"]) for group in optimizer.param_groups] == [(MUON, 1.0), (ADAMW, 1.0)]


def test_where_both_stand_still_without_bases_this_optimizers_ratio_stays(kernel):
    optimizer = halves_with_a_ratio(kernel)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    imported(kernel, optimizer, lr=[0.0, 0.0])
    assert rates(optimizer) == [0.0, 0.0]
    assert under_one_rate(optimizer, 0.1) == pytest.approx([0.1, 0.025], **ROUNDED)


def test_a_shared_tensor_stays_shared(kernel):
    optimizer = halves(kernel, lr=torch.tensor(0.5))
    adamw = torch.optim.AdamW(named_parameters().values(), lr=ADAMW)
    kernel.import_state(optimizer, adamw.state_dict(), "adamw")
    assert rates(optimizer) == pytest.approx([0.5, ADAMW], rel=2 * 2**-24, abs=0)  # a product in float32
    optimizer.param_groups[0]["lr"].fill_(1.0)
    assert rates(optimizer) == pytest.approx([1.0, 2 * ADAMW], rel=2 * 2**-24, abs=0)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_tensors_of_the_source_have_a_ratio_too(kernel, wide):
    optimizer = halves(kernel)
    lr = [torch.tensor(MUON, dtype=wide), torch.tensor(ADAMW, dtype=wide)]
    assert imported(kernel, optimizer, lr=lr) == []
    assert rates(optimizer) == pytest.approx(list(map(float, lr)), rel=2 * torch.finfo(wide).eps, abs=0)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]


@pytest.mark.parametrize("make", [halves, halves_with_a_ratio])
@pytest.mark.parametrize(
    "lr",
    [[0.0, ADAMW], [1e-320, 1e3], [1e9, 5e-324]],
    ids=["Muon stands still", "a ratio above all floats", "a ratio below them"],
)
def test_rates_without_a_ratio_stay_apart_with_a_note(kernel, make, lr):
    optimizer = make(kernel)
    (note,) = imported(kernel, optimizer, lr=lr)
    assert [(group["lr"], group["lr_factor"]) for group in optimizer.param_groups] == [(lr[0], 1.0), (lr[1], 1.0)]
    assert note.startswith(f"group 1: its lr, {lr[1]}, is no longer that of matrices, {lr[0]}, because")


def test_a_base_too_far_from_the_present_rate_stays_apart(kernel):
    optimizer = halves(kernel)
    (note,) = imported(kernel, optimizer, lr=[MUON, 1e-5], initial_lr=[MUON, 1e305])
    assert optimizer.param_groups[1]["lr"] == 1e-5 and optimizer.param_groups[1]["initial_lr"] == 1e305
    assert "because no lr_factor fits" in note


def test_bases_of_numpy_can_be_saved(kernel, tmp_path):
    optimizer = groups_with_rates(kernel)
    imported(kernel, optimizer, initial_lr=[np.float64(MUON), np.float64(ADAMW)])
    torch.save(optimizer.state_dict(), tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    assert [group["initial_lr"] for group in saved["param_groups"]] == [MUON, ADAMW]


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_a_tensor_of_which_a_scheduler_has_made_bases_stays_shared(kernel, wide):
    """The scheduler has given each group a copy as its `initial_lr`."""
    optimizer = halves(kernel, lr=torch.tensor(0.5, dtype=wide))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert imported(kernel, optimizer) == []
    optimizer.step()
    scheduler.step()
    muon, adamw = rates(optimizer)
    assert adamw / muon == pytest.approx(ADAMW / MUON, rel=4 * torch.finfo(wide).eps, abs=0)


def test_what_stands_still_beside_a_base_of_zero_stays_still(kernel):
    optimizer = halves(kernel)
    (note,) = imported(kernel, optimizer, lr=[0.005, 0.0], initial_lr=[0.0, 0.0])
    assert rates(optimizer) == [0.005, 0.0] and "no lr_factor fits" in note


@pytest.mark.parametrize("bases", [[0.08, None], [None, 0.009], [None, None]], ids=str)
def test_a_base_that_the_source_lacks_is_its_rate(kernel, bases):
    optimizer = halves(kernel)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    _, muon, source, others, _ = torch_case()
    for saved, base in zip((muon, others["adamw_state_dict"]), bases):
        saved["param_groups"][0].update({} if base is None else {"initial_lr": base})
    ratio = (bases[1] or ADAMW) / (bases[0] or MUON)
    for _ in range(2):
        kernel.import_state(optimizer, muon, source, **others)
        assert rates(optimizer) == pytest.approx([MUON, ADAMW], **ROUNDED)
        assert [group["initial_lr"] for group in optimizer.param_groups] == 2 * [bases[0] or MUON]
        assert optimizer.param_groups[1]["lr_factor"] == pytest.approx(ratio, **ROUNDED)


def test_unlike_bases_are_not_taken_for_a_rate_of_zero(kernel):
    """At a schedule's end all rates are 0, and say nothing of those with which it began."""
    _, muon, source, others, _ = torch_case()
    muon["param_groups"][0].update(lr=0.0, initial_lr=MUON)
    (group,) = others["adamw_state_dict"]["param_groups"]
    both = [{**group, "params": [0], "initial_lr": 0.003}, {**group, "params": [1, 2], "initial_lr": 0.001}]
    others["adamw_state_dict"]["param_groups"] = [{**each, "lr": 0.0} for each in both]
    optimizer = halves_with_a_ratio(kernel)
    for _ in range(2):
        notes = kernel.import_state(optimizer, muon, source, **others)
        assert "group 1: lr=0.0 of the source is not taken, because its other rate is not" in notes
        assert optimizer.param_groups[1]["lr_factor"] == 0.25


def test_norms_that_are_kept_have_rates_in_another_unit(kernel):
    matrices, rest = groups_by_hand()
    first, second = ({"params": [pair], "use_muon": True} for pair in matrices["params"])
    optimizer = kernel.Muon([{**first, "experimental_hyperball": True}, second, rest], lr=0.5)
    imported(kernel, optimizer)
    assert rates(optimizer) == pytest.approx([0.5, MUON, ADAMW], **ROUNDED)
    assert optimizer.param_groups[2]["lr"] == MUON


def test_the_base_of_a_rate_that_is_not_taken_is_not_taken_either(kernel):
    _, muon, source, others, _ = torch_case()
    (group,) = others["adamw_state_dict"]["param_groups"]
    both = [{**group, "params": [0], "lr": 0.001}, {**group, "params": [1, 2], "lr": 0.002}]
    others["adamw_state_dict"]["param_groups"] = [{**each, "initial_lr": 0.003} for each in both]
    optimizer = halves_with_a_ratio(kernel)
    notes = kernel.import_state(optimizer, muon, source, **others)
    assert "group 1: initial_lr=0.003 of the source is not taken, because its other rate is not" in notes
    assert "initial_lr" not in optimizer.param_groups[1] and optimizer.param_groups[1]["lr_factor"] == 0.25


def test_what_stands_still_in_the_source_stands_still_under_one_rate_for_all(kernel):
    _, state_dict, source, _, _ = timm_case()
    state_dict["param_groups"][0].update(fallback_lr_scale=0.0, initial_lr=0.04)
    optimizer = halves(kernel)
    kernel.import_state(optimizer, state_dict, source)
    assert rates(optimizer) == [0.02, 0.0]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.04, 0.04]
    assert under_one_rate(optimizer, 0.1) == [0.1, 0.0]


@pytest.mark.parametrize("how", [{"fallback_lr_scale": 0.25}, {"adamw_lr": 0.01}], ids=["scale", "as older versions"])
def test_rates_of_timm_are_a_base_and_a_scale(kernel, how):
    _, state_dict, source, _, _ = timm_case()
    (group,) = state_dict["param_groups"]
    del group["fallback_lr_scale"]
    group.update(initial_lr=0.04, **how)
    optimizer = halves(kernel)
    kernel.import_state(optimizer, state_dict, source)
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.04, 0.04]
    assert rates(optimizer) == pytest.approx([0.02, 0.005], **ROUNDED)


def test_rates_of_timm_may_begin_at_zero(kernel):
    """A warm-up without an `initial_lr` gives no ratio, so both halves have the rate that the file has."""
    _, state_dict, source, _, _ = timm_case()
    (group,) = state_dict["param_groups"]
    del group["fallback_lr_scale"]
    group.update(lr=0.0, adamw_lr=0.01)
    optimizer = halves(kernel)
    kernel.import_state(optimizer, state_dict, source)
    assert rates(optimizer) == [0.0, 0.0]


def test_a_ratio_needs_one_rate_of_matrices(kernel):
    params = named_parameters()
    groups = [{"params": [(name, params[name])], "use_muon": True} for name in MATRICES]
    groups.append({"params": [(name, params[name]) for name in REST], "use_muon": False})
    optimizer = kernel.Muon(groups, lr=0.5, adamw_lr=0.125)
    _, muon, source, others, _ = torch_case()
    (group,) = muon["param_groups"]
    muon["param_groups"] = [{**group, "params": [0]}, {**group, "params": [1], "lr": 0.04}]
    notes = kernel.import_state(optimizer, muon, source, **others)
    assert rates(optimizer) == [MUON, 0.04, ADAMW]
    assert len(notes) == 1 and notes[0].startswith(
        "group 2: its lr, 0.003, is no longer that of matrices, 0.02 and 0.04, because"
    )


def test_a_ratio_to_no_rate_of_matrices_is_given_up_with_a_note(kernel):
    matrices, rest = groups_by_hand()
    optimizer = kernel.Muon([{**matrices, "lr": 0.25}, {**rest, "lr": 0.5, "lr_factor": 0.5}])
    notes = imported(kernel, optimizer)
    assert rates(optimizer) == [MUON, ADAMW]
    assert notes == ["group 1: lr_factor=0.5 of this optimizer became 1, as lr is the source's rate"]


def test_without_the_file_of_adamw_its_parameters_are_said_to_stay_as_they_are(kernel):
    _, muon, source, _, _ = torch_case()
    optimizer = halves_with_a_ratio(kernel)
    before = dict(optimizer.param_groups[1])
    (note,) = kernel.import_state(optimizer, muon, source)
    assert note.startswith("AdamW's parameters, wte.weight, up.bias, norm.weight, and their groups stay as they are")
    assert {key: value for key, value in optimizer.param_groups[1].items() if key in before} == before
