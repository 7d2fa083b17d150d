"""From AdamW to Muon: AdamW's part goes on bit for bit, and matrices take what there is."""

import copy

import pytest
import torch
from torch.nn import Parameter

from tests.support.published_muons import MATRICES, REST
from tests.support.small_model import (
    STATE,
    named_parameters,
    same_bits,
    serialized,
    take_steps,
)

# None of them is a default of torch's or of this package's.
SETTINGS = dict(lr=0.003, weight_decay=0.2, betas=(0.85, 0.98), eps=1e-9)


def one_group(params, named=True):
    return list(params.items() if named else params.values())


def by_decay(params, named=True):
    """Two groups as the Trainer and nanoGPT make them: matrices and tables decay, vectors do not."""
    groups = [[pair for pair in params.items() if (pair[1].ndim > 1) == decays] for decays in (True, False)]
    return [
        {"params": pairs if named else [p for _, p in pairs], "weight_decay": decay}
        for pairs, decay in zip(groups, (0.2, 0.0))
    ]


def backwards(params, named=True):
    """Another order, which names put right."""
    assert named
    return list(params.items())[::-1]


def clones(params):
    return {name: Parameter(p.detach().clone()) for name, p in params.items()}


def rest_of(params):
    return {name: params[name] for name in REST}


def trained_by_adamw(make, params, **settings):
    """AdamW by torch's fused kernel, which is the one here too."""
    adamw = torch.optim.AdamW(make, **{**SETTINGS, **settings}, fused=True)
    take_steps(adamw, params, range(3))
    return adamw


CASES = {
    "one group": (lambda params: one_group(params, named=False), one_group),
    "one group with names": (one_group, one_group),
    "another order with names": (backwards, one_group),
    "by decay": (lambda params: by_decay(params, named=False), by_decay),
    "by decay with names": (by_decay, by_decay),
}


@pytest.mark.parametrize("case", CASES)
def test_adamws_part_goes_on_bit_for_bit_and_matrices_take_its_average(kernel, case):
    theirs, ours = CASES[case]
    params = named_parameters()
    adamw = trained_by_adamw(theirs(params), params)
    others = clones(params)
    optimizer = kernel.Muon(ours(others), lr=0.02, momentum=0.9, adamw_betas=(0.5, 0.6), adamw_eps=0.1)
    decay = optimizer.param_groups[0]["weight_decay"]
    notes = kernel.import_state(optimizer, serialized(adamw.state_dict()), "adamw")
    kept = dict(lr="0.02", weight_decay=decay, momentum="0.9", ns_coefficients="'polar_express'", ns_steps="5")
    assert notes == [
        f"group 0: {key} stays {value}, because the source has none for Muon's matrices" for key, value in kept.items()
    ]
    for name in MATRICES:
        assert torch.equal(optimizer.state[others[name]]["momentum_buffer"], adamw.state[params[name]]["exp_avg"])
        assert set(optimizer.state[others[name]]) == STATE[True]
    muon = optimizer.param_groups[0]
    assert (muon["use_muon"], muon["lr"], muon["momentum"]) == (True, 0.02, 0.9)
    take_steps(adamw, params, range(3, 6))
    take_steps(optimizer, others, range(3, 6))
    assert same_bits(rest_of(params), rest_of(others))
    assert not torch.equal(params["up.weight"], others["up.weight"])


def test_muon_with_beta1_as_momentum_would_have_averaged_the_same(kernel):
    """Which is why matrices take `exp_avg` as it is, without a correction for its beginning at zero."""
    params, others = named_parameters(torch.float64), named_parameters(torch.float64)
    adamw = trained_by_adamw(one_group(params), params)
    optimizer = kernel.Muon(others.items(), momentum=SETTINGS["betas"][0])
    take_steps(optimizer, others, range(3))
    for name in MATRICES:
        average, momentum = adamw.state[params[name]]["exp_avg"], optimizer.state[others[name]]["momentum_buffer"]
        # Three steps, each with at most three roundings of numbers below the largest gradient, which is below 8.
        torch.testing.assert_close(average, momentum, rtol=0, atol=3 * 3 * 2**-53 * 8)


def test_groups_with_one_decay_each_keep_this_optimizers_where_it_has_one_for_both(kernel):
    params = named_parameters()
    adamw = trained_by_adamw(by_decay(params, named=False), params)
    optimizer = kernel.Muon(clones(params).items(), weight_decay=0.3)
    notes = kernel.import_state(optimizer, adamw.state_dict(), "adamw")
    assert "group 1: weight_decay stays 0.3, because parameters of this group have 0.2 and 0.0 in the source" in notes
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3]


def test_a_scheduler_goes_on_from_its_base_rate_in_adamws_part_alone(kernel):
    params = named_parameters()
    adamw = trained_by_adamw(one_group(params), params)
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 0.5)
    optimizer = kernel.Muon(clones(params).items(), lr=0.02)
    notes = kernel.import_state(optimizer, adamw.state_dict(), "adamw")
    muon, rest = optimizer.param_groups
    assert rest["lr_factor"] * rest["initial_lr"] == pytest.approx(SETTINGS["lr"], rel=4 * 2**-53, abs=0)
    assert rest["lr_factor"] * rest["lr"] == pytest.approx(SETTINGS["lr"] / 2, rel=4 * 2**-53, abs=0)
    assert "initial_lr" not in muon and rest["initial_lr"] == muon["lr"] == 0.02
    assert any(note.startswith("group 0: no initial_lr, unlike groups that got theirs") for note in notes)
    parted = kernel.Muon([{"params": [pair]} for pair in clones(params).items()], lr=0.02)
    notes = kernel.import_state(parted, adamw.state_dict(), "adamw")
    assert any(note.startswith("groups 1, 3: no initial_lr, unlike groups that got theirs") for note in notes)


def test_averages_of_ascent_keep_their_sign(kernel):
    params, others = named_parameters(), named_parameters()
    adamw = trained_by_adamw(one_group(params), params, maximize=True)
    optimizer = kernel.Muon(others.items())
    kernel.import_state(optimizer, adamw.state_dict(), "adamw")
    assert [group["maximize"] for group in optimizer.param_groups] == [True, True]
    expected = kernel.Muon(others.items(), maximize=True, momentum=SETTINGS["betas"][0])
    take_steps(expected, others, range(3))
    for name in MATRICES:
        buffers = [each.state[others[name]]["momentum_buffer"] for each in (optimizer, expected)]
        assert torch.nn.functional.cosine_similarity(*(each.flatten() for each in buffers), dim=0) > 0.999


def without(state_dict, position):
    changed = copy.deepcopy(state_dict)
    del changed["state"][position]
    return changed


def test_parameter_without_a_state_in_adamw_begins_at_zero(kernel):
    params = named_parameters()
    adamw = trained_by_adamw(one_group(params, named=False), params)
    others = clones(params)
    optimizer = kernel.Muon(others.items())
    take_steps(optimizer, others, [0])
    kernel.import_state(optimizer, without(adamw.state_dict(), 0), "adamw")
    optimizer.state_dict()
    assert not any(value.any() for value in optimizer.state[others["wte.weight"]].values())


def mixed_up(kernel):
    params = named_parameters()
    return trained_by_adamw(list(params.values())[::-1], params).state_dict(), kernel.Muon(clones(params).items())


def of_two_groups_that_look_alike(kernel):
    params = {name: Parameter(torch.ones(8)) for name in ("a.bias", "b.bias")}
    adamw = torch.optim.AdamW([{"params": [p]} for p in params.values()])
    take_steps(adamw, params, [0])
    return adamw.state_dict(), kernel.Muon(params.items())


def too_few(kernel):
    params = named_parameters()
    adamw = torch.optim.AdamW(list(params.values())[1:])
    return adamw.state_dict(), kernel.Muon(params.items())


def of_a_wrapper(kernel):
    state_dict, optimizer = mixed_up(kernel)
    for group in optimizer.param_groups:
        group["params"] = [Parameter(p.detach()) for p in group["params"]]
        group["param_names"] = [f"wrapped.{name}" for name in group["param_names"]]
    return state_dict, optimizer


def with_maxima(kernel):
    params = named_parameters()
    adamw = torch.optim.AdamW(params.items(), amsgrad=True)
    take_steps(adamw, params, [0])
    return adamw.state_dict(), kernel.Muon(params.items())


def in_groups_of_another_order(kernel):
    """As `groups_for` makes them: all queries, then all keys."""
    params = {f"{i}.{name}.weight": Parameter(torch.ones(8, 8)) for i in range(2) for name in ("q", "k")}
    adamw = torch.optim.AdamW(params.values())
    take_steps(adamw, params, [0])
    groups = [{"params": [(name, p) for name, p in params.items() if key in name]} for key in ("q", "k")]
    return adamw.state_dict(), kernel.Muon(groups)


def in_a_group_of_each_branch(kernel):
    """The source has an embedding between two matrices of its shape; here it comes last."""
    params = {name: Parameter(torch.ones(8, 8)) for name in ("0.up.weight", "wpe.weight", "1.up.weight")}
    adamw = torch.optim.AdamW(params.values())
    take_steps(adamw, params, [0])
    parts = {muon: [(name, p) for name, p in params.items() if ("up" in name) is muon] for muon in (True, False)}
    return adamw.state_dict(), kernel.Muon([{"params": part, "use_muon": muon} for muon, part in parts.items()])


def in_a_group_of_each_branch_by_routing(kernel):
    """Neither group says its branch, so the two look like the halves of one that had the embedding last."""
    state_dict, optimizer = in_a_group_of_each_branch(kernel)
    parts = [list(zip(group["param_names"], group["params"])) for group in optimizer.param_groups]
    return state_dict, kernel.Muon([{"params": part} for part in parts])


@pytest.mark.parametrize(
    "make, words",
    [
        (in_a_group_of_each_branch_by_routing, r"parameters \(8, 8\) are in 2 groups here and in 1 of the source"),
        (in_a_group_of_each_branch, r"^the state does not fit:\s+parameters \(8, 8\) are in 2 groups here and in 1"),
        (in_groups_of_another_order, r"\(8, 8\) are in 2 groups here and in 1 of the source: .* Pass `names`"),
        (mixed_up, r"wte.weight \(40, 12\): it comes next in no group of the source\. the source has no names"),
        (of_two_groups_that_look_alike, r"a\.bias \(8,\): it may come next in groups \[0, 1\].* Pass `names`"),
        (too_few, "the source has 4 parameters, this optimizer 5: .* Pass `names`"),
        (of_a_wrapper, "put here by a wrapper, so its place in the order is unknown: .* Pass `names`"),
        (with_maxima, "wte.weight needs the state exp_avg, exp_avg_sq, step, got .*max_exp_avg_sq"),
    ],
)
def test_what_cannot_be_told_of_unnamed_state_is_asked_for(kernel, make, words):
    """Nothing is changed."""
    state_dict, optimizer = make(kernel)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        kernel.import_state(optimizer, state_dict, "adamw")
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(same_bits(state, after["state"][i]) for i, state in before["state"].items())


def test_one_shape_in_both_halves_of_a_group_has_one_order(kernel):
    """As GPT-2 medium's table of positions and its projections have."""
    params = {name: Parameter(torch.ones(8, 8)) for name in ("wpe.weight", "h.0.proj.weight", "h.1.proj.weight")}
    adamw = torch.optim.AdamW(params.values())
    take_steps(adamw, params, [0])
    others = clones(params)
    optimizer = kernel.Muon(others.items())
    kernel.import_state(optimizer, adamw.state_dict(), "adamw")
    for name in ("h.0.proj.weight", "h.1.proj.weight"):
        assert torch.equal(optimizer.state[others[name]]["momentum_buffer"], adamw.state[params[name]]["exp_avg"])


def test_names_put_any_order_right(kernel):
    params = named_parameters()
    adamw = trained_by_adamw(list(params.values())[::-1], params)
    others = clones(params)
    optimizer = kernel.Muon(others.items())
    kernel.import_state(optimizer, adamw.state_dict(), "adamw", names=list(params)[::-1])
    for name in REST:
        assert same_bits(optimizer.state[others[name]], adamw.state[params[name]])
