"""What users say of a model's weights, by patterns of their names, goes before what its modules say."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.support.model_of_many_kinds import NETWORK, Network, chosen


def test_patterns_overrule_the_choice(kernel):
    patterns = {
        "*.c_attn.weight": {"split_rows": (24, 24, 24), "ns_steps": 3},
        "attn.*": {"use_muon": False},
        "gate.weight": {"algorithm": "muon"},
    }
    groups = kernel.groups_for(Network(), patterns=patterns)
    reasons = chosen(groups)
    assert reasons.pop("attn.c_attn.weight") == "pattern:*.c_attn.weight: 72x24 split 24+24+24"
    assert reasons.pop("attn.c_proj.weight") == "pattern:attn.*" and reasons.pop("gate.weight") == "pattern:gate.weight"
    assert (
        reasons.items()
        <= {**NETWORK, "attn.c_attn.bias": "pattern:attn.*", "attn.c_proj.bias": "pattern:attn.*"}.items()
    )
    optimizer = kernel.Muon(groups)
    branches = {row.name: row.branch for row in optimizer.explain().rows}
    assert (branches["attn.c_attn.weight"], branches["attn.c_proj.weight"], branches["gate.weight"]) == (
        "muon", "adamw", "muon",
    )  # fmt: skip
    roles = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert roles["attn.c_attn.weight"]["ns_steps"] == 3
    assert (
        roles["attn.c_attn.weight"]["role"] == "queries, keys and values" and roles["gate.weight"]["role"] == "router"
    )


def test_patterns_may_name_roles(kernel):
    groups = kernel.groups_for(Network(), patterns={"gate.weight": {"role": "mine"}})
    assert [[name for name, _ in group["params"]] for group in groups if group["role"] == "mine"] == [["gate.weight"]]


def test_a_pattern_matches_names_with_and_without_those_of_wrappers(kernel):
    """torch.compile puts `_orig_mod` before each name."""
    model = torch.compile(Network())
    for pattern in ("gate.weight", "_orig_mod.gate.weight"):
        groups = kernel.groups_for(model, patterns={pattern: {"use_muon": True}})
        assert chosen(groups)["_orig_mod.gate.weight"].startswith(f"pattern:{pattern}")


@pytest.mark.parametrize(
    "patterns, words",
    [
        ({"*.c_atn.weight": {}}, r"'\*\.c_atn\.weight' matches no parameter; the first names are \['tok.weight', "),
        ({"attn.*": {"split_row": (8,)}}, r"'attn\.\*' sets \['split_row'\], which are not group keys; these are lr, "),
    ],
)
def test_wrong_patterns_are_named(kernel, patterns, words):
    with pytest.raises(ValueError, match=words):
        kernel.groups_for(Network(), patterns=patterns)


@pytest.mark.parametrize(
    "patterns, error, words",
    [
        (["*"], TypeError, r"patterns must be a dict of settings by patterns of names, got \['\*'\]"),
        ({"*": 5}, TypeError, r"each of patterns must be a string with a dict of settings, got '\*': 5"),
        ({5: {}}, TypeError, "each of patterns must be a string with a dict of settings, got 5: {}"),
        (
            {"*.weight": {"stacked": "x"}},
            TypeError,
            r"the pattern '\*\.weight': stacked must be True or False, got 'x'",
        ),
        (
            {"*.weight": {"split_rows": (0,)}},
            ValueError,
            r"the pattern '\*\.weight': split_rows must be numbers of rows",
        ),
        ({"*.weight": {"use_muon": 5}}, TypeError, r"the pattern '\*\.weight': use_muon must be True, False or None"),
        ({"*.weight": {"role": 5}}, TypeError, r"the pattern '\*\.weight': role must be a string, got 5"),
        (
            {"attn.*": {"use_muon": True}},
            ValueError,
            r"the pattern 'attn\.\*': Muon was asked for attn\.c_attn\.bias, ",
        ),
    ],
    ids=str,
)
def test_wrong_settings_are_shown_with_their_pattern(kernel, patterns, error, words):
    with pytest.raises(error, match=words):
        kernel.groups_for(Network(), patterns=patterns)


def test_a_pattern_answers_what_nothing_told(kernel):
    model = nn.ModuleDict({"attn": nn.ModuleDict({"q_proj": nn.Linear(24, 24, bias=False)})})
    (note,) = kernel.groups_for(model).choices.notes
    assert "no head size is known" in note
    assert kernel.groups_for(model, patterns={"*.q_proj.*": {"split_rows": (12, 12)}}).choices.notes == []


@pytest.mark.parametrize(
    "cure, branch",
    [(dict(stacked=True), "muon"), (dict(stacked=False), "muon"), (dict(use_muon=False), "adamw")],
    ids=str,
)
def test_each_cure_ends_the_question_of_a_stack(kernel, cure, branch):
    """In the group, in patterns, and, of the keys that are arguments too, for all."""
    model = nn.Module()
    model.up, model.w = nn.Linear(64, 64, bias=False), Parameter(torch.zeros(6, 16, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = kernel.groups_for(model)
        for group in groups:
            group.update(cure if group["role"] == "stack_or_convolution" else {})
        by_pattern = kernel.groups_for(model, patterns={"w": cure})
        made = [kernel.Muon(groups), kernel.Muon(by_pattern)]
        if "stacked" in cure:
            made += [kernel.Muon(kernel.groups_for(model), **cure)]
    assert by_pattern.choices.notes == []
    for choices in (by_pattern.choices, *(optimizer.explain() for optimizer in made)):
        assert {row.name: row.branch for row in choices.rows} == {"up.weight": "muon", "w": branch}


def test_expert_keys_end_the_question_of_a_stack(kernel):
    model = nn.Module()
    model.w = Parameter(torch.zeros(6, 16, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = kernel.Muon(kernel.groups_for(model), expert_keys=("w",)).explain().rows
    assert [row.matrices for row in rows] == [6]


def test_patterns_end_the_warning_of_a_muon_that_holds_little(kernel):
    model = nn.Module()
    model.thin, model.up = nn.Linear(1024, 4, bias=False), nn.Linear(8, 8, bias=False)
    with pytest.warns(UserWarning, match="With groups_for, write these keys in its patterns"):
        kernel.Muon(kernel.groups_for(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.Muon(kernel.groups_for(model, patterns={"thin.*": {"use_muon": False}}))


def test_what_neither_name_nor_module_tells_is_asked(kernel):
    model = nn.Module()
    model.w = Parameter(torch.zeros(6, 16, 12))
    (line,) = kernel.groups_for(model).choices.notes
    assert line.startswith("w (6, 16, 12): stacks of matrices, or convolutions?")
    with pytest.warns(UserWarning, match="stacks of matrices, or convolutions"):
        kernel.Muon(kernel.groups_for(model))
    groups = kernel.groups_for(model, patterns={"w": {"stacked": True, "use_muon": True}})
    assert chosen(groups) == {"w": "pattern:w: 6 matrices 16x12"}
