"""What the layers beside a weight show of it: whether it is several matrices in one, which a note then says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.model_of_many_kinds import chosen


def noted(kernel, **layers: nn.Module) -> list[str]:
    """Return the names in a block of these layers whose weights are remarked as uncut."""
    groups = kernel.groups_for(nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict(layers)])}))
    return [
        name
        for name in layers
        if any(f"blocks.0.{name}." in line and "not cut" in line for line in groups.choices.notes)
    ]


def linear(outputs: int, inputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


BESIDE = {
    "a gate and what it gates": ((32, 8), (8, 16), {}, True),
    "a layer that narrows": ((32, 64), (64, 16), {}, False),
    "a next layer that writes as much": ((32, 8), (32, 16), {}, False),
    "a convolution that reads all": ((32, 8), (8, 16), {"conv": nn.Conv1d(32, 32, 3)}, False),
    "a convolution that reads half": ((32, 8), (8, 16), {"conv": nn.Conv1d(16, 16, 3)}, True),
}


@pytest.mark.parametrize("what", BESIDE)
def test_a_weight_may_be_a_gate_and_what_it_gates_where_nothing_reads_it_whole(kernel, what):
    one, other, others, is_noted = BESIDE[what]
    assert noted(kernel, first=linear(*one), second=linear(*other), **others) == (["first"] if is_noted else [])


@pytest.mark.parametrize("rows, is_noted", [(96, True), (48, False)])
def test_a_name_of_queries_keys_and_values_tells_of_several_matrices_where_there_is_room(kernel, rows, is_noted):
    """For two squares at least; in capitals, too."""
    for name in ("to_qkv_mlp_proj", "toQKVandMLP"):
        assert noted(kernel, **{name: linear(rows, 32)}) == ([name] if is_noted else [])


@pytest.mark.parametrize("times", [1, 3])
def test_an_in_proj_is_several_matrices_if_it_writes_several_times_what_out_proj_reads(kernel, times):
    names = noted(kernel, in_proj=linear(times * 32, 32), out_proj=linear(32, 32))
    assert names == (["in_proj"] if times > 1 else [])


@pytest.mark.parametrize("name", ["gate_up_proj", "gate_up", "gate_and_up_proj", "w12", "Wi"])
def test_names_of_gate_and_up_are_enough(kernel, name):
    """Those of transformers, timm and ModernBERT, among others."""
    model = nn.ModuleDict({"mlp": nn.ModuleDict({name: linear(32, 8)})})
    assert chosen(kernel.groups_for(model)) == {f"mlp.{name}.weight": "gate and up: 32x8 split 16+16"}


def test_a_class_whose_name_only_begins_as_that_of_a_gated_layer_is_none(kernel):
    """Tasks of GLUE are no gated linear units."""
    halves = {}
    for kind in ("GluMlp", "Glued"):
        block = type(kind, (nn.ModuleDict,), {})({"fc1": linear(32, 8), "fc2": linear(8, 16)})
        halves[kind] = "split" in chosen(kernel.groups_for(nn.ModuleDict({"block": block})))["block.fc1.weight"]
    assert halves == {"GluMlp": True, "Glued": False}


@pytest.mark.parametrize("name", ["img_mod", "txt_mod", "adaLN_modulation", "time_proj"])
def test_modulations_of_diffusion_transformers_are_remarked(kernel, name):
    notes = kernel.groups_for(nn.ModuleDict({name: nn.Linear(16, 96)})).choices.notes
    assert any("shifts, scales and gates" in note for note in notes)


def test_odd_rows_of_gate_and_up_stay_together(kernel):
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate_up_proj": linear(33, 8)})})
    assert all("split_rows" not in group for group in kernel.groups_for(model))


def test_groups_of_a_transposed_convolution_are_runs_of_its_inputs(kernel):
    """Its weight is (in, out / groups, ...)."""
    model = nn.ModuleDict({"up": nn.ConvTranspose2d(8, 24, 3, groups=2, bias=False), "down": nn.Conv2d(24, 8, 3)})
    (split,) = [group["split_rows"] for group in kernel.groups_for(model) if "split_rows" in group]
    assert split == (4, 4)


def test_experts_whose_sizes_fit_neither_way_are_told(kernel):
    """As (E, out, in) gate and up would have twice as many rows as the down projection has columns."""
    experts = nn.Module()
    for name, shape in {"gate_up_proj": (4, 40, 8), "down_proj": (4, 8, 16)}.items():
        experts.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    notes = kernel.groups_for(nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})).choices.notes
    assert any("assumed to be (E, out, in), because no sizes show it" in line for line in notes)


def test_queries_without_keys_make_no_attention(kernel):
    """Of what has heads and is not called one."""
    block = nn.ModuleDict({"query": linear(32, 32), "value": linear(32, 32)})
    block.num_heads = 4
    reasons = chosen(kernel.groups_for(nn.ModuleDict({"mixer": block})))
    assert {reason.partition(": ")[2] for reason in reasons.values()} == {""}


def test_a_factor_of_lora_beside_a_modulation_is_not_remarked(kernel):
    """Its rows are those of several matrices, but B maps a space of few dimensions to all of them at once."""
    factors = nn.ModuleDict({"lora_A": nn.Linear(16, 4, bias=False), "lora_B": nn.Linear(4, 96, bias=False)})
    remarked = {}
    for name, layer in {"factors": factors, "a layer": nn.Linear(16, 96)}.items():
        notes = kernel.groups_for(nn.ModuleDict({"adaLN_modulation": layer})).choices.notes
        remarked[name] = any("shifts, scales and gates" in note for note in notes)
    assert remarked == {"factors": False, "a layer": True}
