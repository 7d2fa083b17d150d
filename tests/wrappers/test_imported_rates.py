"""After an import each parameter moves by the rate that the source has for it, and so it does under a scheduler."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.support.published_muons import MATRICES, REST, timm_case, torch_case
from tests.support.small_model import named_parameters

MUON, ADAMW = 0.02, 0.003  # the rates of `torch_case`
# A rate is a product of two numbers that come from it in two divisions: at most four roundings, and each scheduler's.
ROUNDED = {"rel": 6 * 2**-53, "abs": 0}


def halves(kernel, lr=0.5):
    return kernel.Muon(named_parameters().items(), lr=lr)


def halves_with_a_ratio(kernel):
    return kernel.Muon(named_parameters().items(), lr=0.5, adamw_lr=0.125)


def groups_with_a_ratio(kernel):
    return kernel.Muon(groups_by_hand(), lr=0.5, adamw_lr=0.125)


def groups_with_one_rate(kernel):
    return kernel.Muon(groups_by_hand(), lr=0.5)


def groups_with_rates(kernel):
    matrices, rest = groups_by_hand()
    return kernel.Muon([{**matrices, "lr": 0.5}, {**rest, "lr": 0.25}])


SHARING = [halves, halves_with_a_ratio, groups_with_a_ratio, groups_with_one_rate]


def groups_by_hand():
    params = named_parameters()
    names = {True: MATRICES, False: REST}
    return [{"params": [(name, params[name]) for name in names[muon]], "use_muon": muon} for muon in (True, False)]


def rates(optimizer):
    return [float(group["lr"] * group["lr_factor"]) for group in optimizer.param_groups]


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


@pytest.mark.parametrize("make", [*SHARING, groups_with_rates])
@pytest.mark.parametrize("bases", [{}, {"initial_lr": [0.08, 0.009]}], ids=["constant", "in a schedule"])
def test_each_rate_is_the_sources_however_often_it_is_imported(kernel, make, bases):
    optimizer = make(kernel)
    for _ in range(2):
        notes = imported(kernel, optimizer, **bases)
        assert all("other places of their schedules" in note for note in notes)
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


@pytest.mark.parametrize("make", [halves, groups_with_rates])
@pytest.mark.parametrize("steps", [1, 4, 9], ids=["begin", "middle", "end"])
def test_a_schedule_goes_on_where_the_source_was(kernel, make, steps):
    """As the FAQ says; the last rate is 0."""

    def schedule(step):
        return 1 - step / 9

    optimizer, now = make(kernel), schedule(steps)
    imported(kernel, optimizer, lr=[now * MUON, now * ADAMW], initial_lr=[MUON, ADAMW])
    assert rates(optimizer) == pytest.approx([now * MUON, now * ADAMW], **ROUNDED)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule, last_epoch=steps - 1)
    assert rates(optimizer) == pytest.approx([now * MUON, now * ADAMW], **ROUNDED)
    optimizer.step()
    scheduler.step()
    following = schedule(steps + 1)
    assert rates(optimizer) == pytest.approx([following * MUON, following * ADAMW], **ROUNDED)
    if make is halves:
        assert len({group["lr"] for group in optimizer.param_groups}) == 1


SCHEDULERS = {
    "lambda": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=9),
    "exponential": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    "warmup and cosine": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6),
        ],
        milestones=[3],
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("steps", [2, 5])
def test_a_scheduler_that_has_caught_up_goes_on_as_those_of_the_source(kernel, scheduler, steps):
    """As the FAQ says."""
    params, schedule = named_parameters(), SCHEDULERS[scheduler]
    muon = torch.optim.Muon([params[name] for name in MATRICES], lr=MUON)
    adamw = torch.optim.AdamW([params[name] for name in REST], lr=ADAMW)
    old = [schedule(muon), schedule(adamw)]
    optimizer = halves(kernel, lr=MUON)
    new = schedule(optimizer)
    for each in [*old, new] * steps:
        each.step()
    kernel.import_state(optimizer, muon.state_dict(), adamw_state_dict=adamw.state_dict())
    for _ in range(3):
        expected = [each.param_groups[0]["lr"] for each in (muon, adamw)]
        # One formula of a scheduler has at most eight roundings at each step.
        assert rates(optimizer) == pytest.approx(expected, rel=8 * 8 * 2**-53, abs=0)
        for each in (*old, new):
            each.step()


def test_at_one_place_of_a_schedule_both_halves_have_one_value(kernel):
    """Rounding alone does not part them: a shared tensor stays shared, and so does what a logger shows."""
    generator = torch.Generator().manual_seed(0)
    for muon, adamw, share in torch.rand(40, 3, generator=generator, dtype=torch.float64).tolist():
        optimizer = halves(kernel)
        imported(kernel, optimizer, lr=[share * muon, share * adamw], initial_lr=[muon, adamw])
        assert [group["initial_lr"] for group in optimizer.param_groups] == [muon, muon]
        assert len({group["lr"] for group in optimizer.param_groups}) == 1


@pytest.mark.parametrize("rate", [MUON / 8, 0.0], ids=["later", "not begun"])
def test_unlike_schedules_of_the_source_go_on_from_their_bases(kernel, rate):
    optimizer, share = halves(kernel), rate / MUON
    (note,) = imported(kernel, optimizer, lr=[MUON / 2, share * ADAMW], initial_lr=[MUON, ADAMW])
    assert note.startswith("group 1: its lr is") and "other places of their schedules" in note
    assert rates(optimizer) == pytest.approx([MUON / 2, share * ADAMW], **ROUNDED)
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5, lambda step: share], last_epoch=7)
    assert rates(optimizer) == pytest.approx([MUON / 2, share * ADAMW], **ROUNDED)


def test_adamws_file_in_the_middle_of_a_schedule_gives_the_ratio_of_its_base(kernel):
    params = named_parameters()
    adamw = torch.optim.AdamW(params.values(), lr=ADAMW)
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 0.5)
    optimizer = halves(kernel, lr=0.08)
    kernel.import_state(optimizer, adamw.state_dict(), "adamw")
    assert rates(optimizer) == pytest.approx([0.08, ADAMW / 2], **ROUNDED)
    assert under_one_rate(optimizer, 0.08) == pytest.approx([0.08, ADAMW], **ROUNDED)


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
    assert "have no ratio" in note


def test_bases_of_numpy_can_be_saved(kernel, tmp_path):
    optimizer = groups_with_rates(kernel)
    imported(kernel, optimizer, initial_lr=[np.float64(MUON), np.float64(ADAMW)])
    torch.save(optimizer.state_dict(), tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    assert [group["initial_lr"] for group in saved["param_groups"]] == [MUON, ADAMW]


def test_the_base_of_a_rate_that_is_not_taken_is_not_taken_either(kernel):
    _, muon, source, others, _ = torch_case()
    (group,) = others["adamw_state_dict"]["param_groups"]
    both = [{**group, "params": [0], "lr": 0.001}, {**group, "params": [1, 2], "lr": 0.002}]
    others["adamw_state_dict"]["param_groups"] = [{**each, "initial_lr": 0.003} for each in both]
    optimizer = halves_with_a_ratio(kernel)
    notes = kernel.import_state(optimizer, muon, source, **others)
    assert "group 1: initial_lr=0.003 of the source is not taken, because its lr is not" in notes
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
