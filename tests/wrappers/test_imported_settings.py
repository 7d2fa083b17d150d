"""What an import makes of settings that the source has otherwise, or not at all."""

import warnings

import pytest
import torch
from torch.nn import Parameter

from tests.support.imported_rates import ADAMW, MUON, ROUNDED, groups_by_hand, imported, rates
from tests.support.published_muons import CASES, FOREIGN, dion_case, fresh, timm_case, torch_case
from tests.support.small_model import named_parameters, same_bits, take_steps
from tests.wrappers.test_state_of_adamw import clones, one_group, rest_of, trained_by_adamw


def test_adamws_part_goes_on_by_adamw_whatever_the_fallback_here_was(kernel):
    params = named_parameters()
    adamw = trained_by_adamw(one_group(params), params)
    others = clones(params)
    optimizer = kernel.Muon(others.items(), fallback="nadamw")
    kernel.import_state(optimizer, adamw.state_dict(), "adamw")
    assert optimizer.param_groups[1]["fallback"] == "adamw"
    take_steps(adamw, params, [3])
    take_steps(optimizer, others, [3])
    assert same_bits(rest_of(params), rest_of(others))


def test_a_file_of_timm_without_a_multiplier_is_noted_and_leaves_that_of_this_optimizer(kernel):
    _, state_dict, source, _, _ = timm_case()
    state_dict["param_groups"][0]["adjust_lr_fn"] = ""
    _, optimizer = fresh(kernel)
    notes = kernel.import_state(optimizer, state_dict, source)
    assert notes == ["group 0: adjust_lr_fn='' of the source has no counterpart"]
    assert optimizer.param_groups[0]["adjust_lr_fn"] == FOREIGN["adjust_lr_fn"]


def test_rates_of_norms_that_are_kept_count_where_there_are_no_others(kernel):
    """One rate for all groups then changes the source's rate of AdamW and that of this optimizer by one factor."""
    optimizer = kernel.Muon(named_parameters().items(), lr=0.5, experimental_hyperball=True)
    imported(kernel, optimizer)
    assert rates(optimizer) == pytest.approx([0.5, ADAMW], **ROUNDED)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_ratio_needs_one_base_of_matrices(kernel):
    """Equal rates of two schedules may part again."""
    matrices, rest = groups_by_hand()
    optimizer = kernel.Muon([*({"params": [pair], "use_muon": True} for pair in matrices["params"]), rest], lr=0.5)
    _, muon, source, others, _ = torch_case()
    (group,) = muon["param_groups"]
    muon["param_groups"] = [{**group, "params": [i], "initial_lr": base} for i, base in enumerate((MUON, 2 * MUON))]
    others["adamw_state_dict"]["param_groups"][0]["initial_lr"] = ADAMW
    kernel.import_state(optimizer, muon, source, **others)
    assert [(group["lr"], group["lr_factor"]) for group in optimizer.param_groups] == [*[(MUON, 1.0)] * 2, (ADAMW, 1.0)]


def test_an_import_warns_of_nothing(kernel):
    """What it brings is asked for, unlike settings that replace others when a file is loaded."""
    _, state_dict, source, others, _ = CASES["timm"]()
    _, optimizer = fresh(kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.import_state(optimizer, state_dict, source, **others)


def test_a_decay_rate_is_noted_only_where_the_rate_is_another_one(kernel):
    optimizer = kernel.Muon([("w", Parameter(torch.ones(12, 20)))], lr=1e-3, decay_mode="corrected")
    source = torch.optim.Muon([Parameter(torch.ones(12, 20))], lr=1e-3)
    assert "decay_lr" not in " ".join(kernel.import_state(optimizer, source.state_dict()))


def test_rates_of_all_groups_of_the_source_are_compared_and_each_is_named_once(kernel):
    _, state_dict, source, _, _ = dion_case()
    muon, rest = state_dict["param_groups"]
    others = [{**rest, "params": [key], "lr": rate} for key, rate in zip(rest["params"], (0.25, 0.25, 0.5))]
    _, optimizer = fresh(kernel)
    notes = kernel.import_state(optimizer, {**state_dict, "param_groups": [muon, *others]}, source)
    words = "because parameters of this group have 0.25 and 0.5 in the source"
    assert any(note.startswith("group 1: lr stays") and note.endswith(words) for note in notes)
