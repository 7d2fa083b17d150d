"""The groups of the Motif kernel: those of its function, and what a group may say."""

import pytest
import torch
from torch import nn

from tests.support.small_model import named_parameters


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(40, 8)
        self.experts = nn.ParameterDict(
            {"up": nn.Parameter(torch.ones(3, 16, 8)), "scale": nn.Parameter(torch.ones(3, 8))}
        )
        self.attention = nn.ModuleDict({"output": nn.Linear(8, 8, bias=False), "frozen": nn.Linear(8, 8, bias=False)})
        self.lm_head = nn.Linear(8, 40)
        self.attention["frozen"].requires_grad_(False)


@pytest.mark.parametrize(
    "keys, muons",
    [((), {"experts.up", "experts.scale"}), ((None, ("experts",)), {"experts.up"})],
    ids=["by default", "with expert keys"],
)
def test_default_groups_are_the_kernels(kernel, keys, muons):
    """A component that is `output` is a head there; what is frozen is in no group."""
    compat = kernel.compat
    args = () if not keys else (compat.default_is_muon, keys[1])
    muon, rest = compat.get_default_muon_param_groups(Model(), *args)
    assert (set(muon["names"]), muon["use_muon"], rest["use_muon"]) == (muons, True, False)
    assert "attention.output.weight" in rest["names"] and "attention.frozen.weight" not in rest["names"]
    (group, _) = compat.get_default_muon_param_groups(Model(), lambda name, p: name == "lm_head.weight")
    assert group["names"] == ["lm_head.weight"]
    assert {p.ndim for p in muon["params"]} == {2 if name.endswith("scale") else 3 for name in muons}


def attention_groups(kernel):
    weights = {f"layers.3.attn.{name}.weight": nn.Parameter(torch.eye(8)) for name in ("q_proj", "k_proj")}
    return weights, [{"params": list(weights.values()), "names": list(weights), "use_muon": True}]


def test_stacks_need_no_keys(kernel):
    """Whatever their names."""
    stack = {"params": [nn.Parameter(torch.ones(3, 16, 8))], "names": ["mixing.weight"], "use_muon": True}
    optimizer = kernel.compat.Muon([*kernel.compat.get_default_muon_param_groups(Model()), stack])
    matrices = {row.name: row.matrices for row in optimizer.explain().rows}
    assert matrices["experts.up"] == matrices["mixing.weight"] == 3


def test_a_group_is_added_as_the_constructor_takes_it(kernel):
    """With `names`, and the lower bound of the norm by the group's momentum."""
    _, groups = attention_groups(kernel)
    added = {"params": [nn.Parameter(torch.eye(8))], "names": ["up.weight"], "use_muon": True, "momentum": 0.5}
    added["none_grad"] = True  # which the kernel's groups have, and its constructor here
    whole, grown = kernel.compat.Muon([*groups, added]), kernel.compat.Muon(groups)
    grown.add_param_group(added)
    assert grown.param_groups == whole.param_groups and grown.param_groups[1]["param_names"] == ["up.weight"]
    assert "none_grad" not in grown.param_groups[1]
    for without in ({"params": [nn.Parameter(torch.eye(8))]}, [nn.Parameter(torch.eye(8))]):
        with pytest.raises(ValueError, match="group 2 does not set use_muon"):
            grown.add_param_group(without)


@pytest.mark.parametrize(
    "names, error, words",
    [
        (["a"], ValueError, "1 names were given for 2 params"),
        (["a", "b", "c"], ValueError, "3 names were given for 2 params"),
        (None, TypeError, "names must be a list of names, got None"),
        ("ab", TypeError, "names must be a list of names, got 'ab'"),
    ],
)
def test_no_parameter_is_without_a_name_if_names_are_given(kernel, names, error, words):
    group = {"params": [nn.Parameter(torch.eye(8)) for _ in range(2)], "use_muon": True}
    with pytest.raises(error, match=f"^{words}"):
        kernel.compat.Muon([{**group, "names": names}])
    optimizer = kernel.compat.Muon([{**group, "params": iter(group["params"]), "names": dict.fromkeys("ab").keys()}])
    assert optimizer.param_groups[0]["param_names"] == ["a", "b"]


def test_groups_without_a_choice_say_what_to_write(kernel):
    """As in the kernel, which refuses parameters alone, too."""
    group = {"params": list(named_parameters().values())}
    for params in (named_parameters().values(), [group], [{**group, "use_muon": None}]):
        with pytest.raises(ValueError, match="group 0 does not set use_muon: write Muon"):
            kernel.compat.Muon(params)
