"""After an import each parameter moves by the rate that the source has for it, and so it does under a scheduler."""

import pytest
import torch

from tests.support.published_muons import MATRICES, REST, timm_case, torch_case
from tests.support.small_model import named_parameters

MUON, ADAMW = 0.02, 0.003  # the rates of `torch_case`


def halves(kernel):
    return kernel.Muon(named_parameters().items(), lr=0.5)


def halves_with_a_ratio(kernel):
    return kernel.Muon(named_parameters().items(), lr=0.5, adamw_lr=0.125)


def groups_with_a_ratio(kernel):
    return kernel.Muon(groups_by_hand(), lr=0.5, adamw_lr=0.125)


def groups_with_rates(kernel):
    matrices, rest = groups_by_hand()
    return kernel.Muon([{**matrices, "lr": 0.5}, {**rest, "lr": 0.5}])


def groups_by_hand():
    params = named_parameters()
    names = {True: MATRICES, False: REST}
    return [{"params": [(name, params[name]) for name in names[muon]], "use_muon": muon} for muon in (True, False)]


def rates(optimizer):
    return [group["lr"] * group["lr_factor"] for group in optimizer.param_groups]


def imported(kernel, optimizer, **changes):
    """The notes of an import of `torch_case` with `changes` in its groups: lists, one value for each file."""
    _, muon, source, others, _ = torch_case()
    for key, values in changes.items():
        for saved, value in zip((muon, others["adamw_state_dict"]), values):
            saved["param_groups"][0][key] = value
    return kernel.import_state(optimizer, muon, source, **others)


def under_one_rate(optimizer, lr):
    """The rates after a loop has set one `lr` for all groups, as OneCycleLR does."""
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=9, div_factor=1)
    return rates(optimizer)


@pytest.mark.parametrize("make", [halves, halves_with_a_ratio, groups_with_a_ratio, groups_with_rates])
def test_each_rate_is_the_sources(kernel, make):
    optimizer = make(kernel)
    assert imported(kernel, optimizer) == []
    assert rates(optimizer) == pytest.approx([MUON, ADAMW], rel=1e-15)
    assert imported(kernel, optimizer) == []
    assert rates(optimizer) == pytest.approx([MUON, ADAMW], rel=1e-15)


@pytest.mark.parametrize("make", [halves, halves_with_a_ratio, groups_with_a_ratio])
def test_one_rate_for_all_keeps_the_sources_ratio(kernel, make):
    optimizer = make(kernel)
    imported(kernel, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [MUON, MUON]
    assert under_one_rate(optimizer, 0.01) == pytest.approx([0.01, 0.01 * ADAMW / MUON], rel=1e-15)


def test_groups_with_rates_of_their_own_keep_them(kernel):
    optimizer = groups_with_rates(kernel)
    imported(kernel, optimizer)
    assert [(group["lr"], group["lr_factor"]) for group in optimizer.param_groups] == [(MUON, 1.0), (ADAMW, 1.0)]


@pytest.mark.parametrize("make", [halves, groups_with_rates])
@pytest.mark.parametrize("share", [1.0, 0.25, 0.0], ids=["begin", "middle", "end"])
def test_a_schedule_goes_on_from_the_sources_bases(kernel, make, share):
    optimizer = make(kernel)
    imported(kernel, optimizer, lr=[share * MUON, share * ADAMW], initial_lr=[MUON, ADAMW])
    assert rates(optimizer) == pytest.approx([share * MUON, share * ADAMW], rel=1e-15)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5, last_epoch=7)
    assert rates(optimizer) == pytest.approx([0.5 * MUON, 0.5 * ADAMW], rel=4e-16)
    if make is halves:
        assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[1]["lr"]


def test_rounding_does_not_part_the_bases_of_one_schedule(kernel):
    """Else a scheduler would set two values, and a second import would take them for rates of the groups' own."""
    generator = torch.Generator().manual_seed(0)
    for muon, adamw, share in torch.rand(40, 3, generator=generator, dtype=torch.float64).tolist():
        optimizer = halves(kernel)
        imported(kernel, optimizer, lr=[share * muon, share * adamw], initial_lr=[muon, adamw])
        assert [group["initial_lr"] for group in optimizer.param_groups] == [muon, muon]


def test_unlike_schedules_of_the_source_go_on_from_their_bases(kernel):
    optimizer = halves(kernel)
    imported(kernel, optimizer, lr=[MUON / 2, ADAMW / 8], initial_lr=[MUON, ADAMW])
    assert rates(optimizer) == pytest.approx([MUON / 2, ADAMW / 8], rel=1e-15)
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5, lambda step: 0.125], last_epoch=7)
    assert rates(optimizer) == pytest.approx([MUON / 2, ADAMW / 8], rel=1e-15)


@pytest.mark.parametrize(
    "changes, kept",
    [
        ({"lr": [0.0, ADAMW]}, [0.0, ADAMW]),
        ({"lr": [MUON, 0.0], "initial_lr": [MUON, ADAMW]}, [MUON, 0.0]),
        ({"lr": [torch.tensor(MUON), ADAMW]}, [torch.tensor(MUON).item(), ADAMW]),
        ({"lr": [1e-320, 1e3]}, [1e-320, 1e3]),
    ],
    ids=["Muon stands still", "AdamW has not begun", "a tensor", "too far apart"],
)
def test_rates_without_a_ratio_stay_apart(kernel, changes, kept):
    optimizer = halves_with_a_ratio(kernel)
    notes = imported(kernel, optimizer, **changes)
    assert [float(group["lr"]) for group in optimizer.param_groups] == kept
    assert optimizer.param_groups[1]["lr_factor"] == 1.0
    assert notes == ["group 1: lr_factor=0.25 of this optimizer became 1, as lr is the source's rate"]


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
    assert rates(optimizer) == [0.02, 0.005]


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
    assert notes == ["group 2: lr_factor=0.25 of this optimizer became 1, as lr is the source's rate"]


def test_without_the_file_of_adamw_its_parameters_are_said_to_stay_as_they_are(kernel):
    _, muon, source, _, _ = torch_case()
    optimizer = halves_with_a_ratio(kernel)
    before = dict(optimizer.param_groups[1])
    (note,) = kernel.import_state(optimizer, muon, source)
    assert note.startswith("AdamW's parameters, wte.weight, up.bias, norm.weight, and their groups stay as they are")
    assert {key: value for key, value in optimizer.param_groups[1].items() if key in before} == before
