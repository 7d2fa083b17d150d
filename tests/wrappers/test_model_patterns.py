"""What users say of a model's weights, by patterns of their names, goes before what its modules say."""

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.support.model_of_many_kinds import NETWORK, Network, chosen

pytestmark = pytest.mark.kernels_ci


def test_patterns_overrule_the_choice(kernel):
    patterns = {
        "*.c_attn.weight": {"split_rows": (24, 24, 24), "ns_steps": 3},
        "attn.*": {"use_muon": False},
        "gate.weight": {"algorithm": "muon"},
    }
    groups = kernel.groups_for(Network(), patterns=patterns)
    found = chosen(groups)
    assert found.pop("attn.c_attn.weight") == "pattern:*.c_attn.weight: 72x24 split 24+24+24"
    assert found.pop("attn.c_proj.weight") == "pattern:attn.*" and found.pop("gate.weight") == "pattern:gate.weight"
    assert (
        found.items() <= {**NETWORK, "attn.c_attn.bias": "pattern:attn.*", "attn.c_proj.bias": "pattern:attn.*"}.items()
    )
    optimizer = kernel.Muon(groups)
    branches = {row.name: row.branch for row in optimizer.explain().rows}
    assert (branches["attn.c_attn.weight"], branches["attn.c_proj.weight"], branches["gate.weight"]) == (
        "muon", "adamw", "muon",
    )  # fmt: skip
    assert [group["ns_steps"] for group in optimizer.param_groups if group["role"] == "pattern:*.c_attn.weight"] == [3]


@pytest.mark.parametrize(
    "patterns, words",
    [
        ({"*.c_atn.weight": {}}, r"'\*\.c_atn\.weight' matches no parameter; names are such as \['tok.weight', "),
        ({"attn.*": {"split_row": (8,)}}, r"'attn\.\*' sets \['split_row'\], which no group has: it has lr, "),
    ],
)
def test_wrong_patterns_are_named(kernel, patterns, words):
    with pytest.raises(ValueError, match=words):
        kernel.groups_for(Network(), patterns=patterns)


def test_what_neither_name_nor_module_tells_is_asked(kernel):
    model = nn.Module()
    model.w = Parameter(torch.zeros(6, 16, 12))
    (line,) = kernel.groups_for(model).choices.notes
    assert line.startswith("w (6, 16, 12): stacks of matrices, or convolutions?")
    with pytest.warns(UserWarning, match="stacks of matrices, or convolutions"):
        kernel.Muon(kernel.groups_for(model))
    groups = kernel.groups_for(model, patterns={"w": {"stacked": True, "use_muon": True}})
    assert chosen(groups) == {"w": "pattern:w: 6 matrices 16x12"}
