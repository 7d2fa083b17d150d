"""`explain()` of the optimizer says, as `print(groups)` does, which weights `groups_for` could not cut, and why."""

import copy
import importlib
import io
import operator
import pickle

import pytest
import torch
from torch import nn

from tests.support.model_of_many_kinds import Experts
from tests.support.small_model import take_steps


def gates(prefix="a"):
    """An LSTM, whose gates are not cut: one line about two weights."""
    return nn.ModuleDict({prefix: nn.LSTM(8, 16)})


def said(notes):
    return [note for note in notes if "not cut" in note or "assumed" in note]


def saved_and_loaded(kernel, optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = kernel.Muon(kernel.groups_for(gates()))
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


LATER = {
    "at once": lambda kernel, optimizer: optimizer,
    "deepcopy": lambda kernel, optimizer: copy.deepcopy(optimizer),
    "pickle": lambda kernel, optimizer: pickle.loads(pickle.dumps(optimizer)),
    "state_dict": saved_and_loaded,
}


class Modulation(nn.Module):
    """As Flux 2's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 96)


class FocalModulation(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(16, 35)


def test_several_matrices_in_one_are_remarked(kernel):
    """LFM2's gates of short convolutions, Flux 2's attention and modulation, Wan's; FocalNet's is something else."""
    conv = nn.ModuleDict({"in_proj": nn.Linear(16, 48), "out_proj": nn.Linear(16, 16)})
    block = {"conv": conv, "to_qkv_mlp_proj": nn.Linear(16, 112), "time_proj": nn.Linear(16, 96)}
    model = nn.ModuleDict({"block": nn.ModuleDict({**block, "one": Modulation(), "two": FocalModulation()})})
    lines = said(kernel.groups_for(model).choices.notes)
    assert len(lines) == 3
    assert "conv.in_proj" in lines[0] and "they write 3 times as many features as out_proj reads" in lines[0]
    assert "to_qkv_mlp_proj" in lines[1] and "order of the rows" in lines[1]
    assert "time_proj" in lines[2] and "and 1 more" in lines[2]


@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
def test_explain_has_the_remarks_of_groups_for(kernel, later):
    model = gates()
    groups = kernel.groups_for(model)
    optimizer = kernel.Muon(groups)
    take_steps(optimizer, dict(model.named_parameters()), range(1))
    remarks = said(later(kernel, optimizer).explain().notes)
    assert remarks == said(groups.choices.notes) and len(remarks) == 1
    assert remarks[0].startswith("rows of a.weight_ih_l0 and 1 more are not cut, because gates of recurrent layers")


def test_groups_keep_their_keys(kernel):
    group = kernel.Muon(kernel.groups_for(gates())).param_groups[0]
    plain = kernel.Muon([{"params": [torch.zeros(8, 8)], "use_muon": True, "role": "matrix", "reason": "matrix"}])
    assert group.keys() == plain.param_groups[0].keys()


def test_the_factory_for_the_trainer_keeps_the_remarks(kernel):
    trainer = importlib.import_module(".interop.trainer", kernel.__name__)
    optimizer = trainer.MuonFactory()(gates(), args=None)
    assert len(said(optimizer.explain().notes)) == 1


def test_what_has_been_cut_since_is_not_remarked(kernel):
    """By its group before construction, by its group afterwards, and by a state that was saved with the cut."""
    groups = kernel.groups_for(gates())
    for group in groups:
        if group["use_muon"]:
            group["split_rows"] = (16,) * 4
    cut = kernel.Muon(groups)
    optimizer = kernel.Muon(kernel.groups_for(gates()))
    assert said(cut.explain().notes) == [] and len(said(optimizer.explain().notes)) == 1
    optimizer.load_state_dict(cut.state_dict())
    assert said(optimizer.explain().notes) == []
    for group in optimizer.param_groups:
        group["split_rows"] = None
    assert len(said(optimizer.explain().notes)) == 1


def test_what_a_user_gives_to_adamw_is_not_remarked(kernel):
    groups = kernel.groups_for(gates())
    for group in groups:
        group["use_muon"] = False
    assert said(kernel.Muon(groups).explain().notes) == []


def test_modulations_are_remarked(kernel):
    """Of diffusion transformers: by a module's name, or by its class; a square one has one part."""

    class AdaLayerNormZero(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 96)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(16, 96))
            self.img_mod, self.modulation = nn.ModuleDict({"lin": nn.Linear(16, 96)}), nn.Module()
            self.modulation.f, self.modulation.lin = nn.Linear(16, 96), nn.Linear(16, 16)  # FocalNet's, and a square
            self.norm1, self.up = AdaLayerNormZero(), nn.Linear(16, 96)

    (line,) = said(kernel.Muon(kernel.groups_for(nn.ModuleDict({"block": Block()}))).explain().notes)
    assert "block.adaLN_modulation.1.weight" in line and "and 2 more" in line and "shifts, scales and gates" in line


class GluMlp(nn.Module):
    """As timm's, whose weights have the names of any layers."""

    def __init__(self, written=2):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(16, 24 * written), nn.LayerNorm(24), nn.Linear(24, 16)


class SharedMLP(GluMlp):
    """As transformers' of GraniteMoeShared: only sizes show that it is gated."""


class GEGLU(nn.Module):
    """As diffusers', whose product a layer of another module reads."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 48)


def test_a_gated_layer_of_any_name_is_cut_where_its_class_says_so_and_else_remarked(kernel):
    shared = nn.ModuleDict({"input_linear": nn.Linear(16, 48), "output_linear": nn.Linear(24, 16)})  # as Granite's
    model = {"a": GluMlp(), "b": GEGLU(), "plain": GluMlp(written=1), "sizes": SharedMLP(), "shared": shared}
    model = nn.ModuleDict(model)
    groups = kernel.groups_for(model)
    cut = {name: group["split_rows"] for group in groups for name, _ in group["params"] if "split_rows" in group}
    assert cut == dict.fromkeys(("a.fc1.weight", "b.proj.weight", "shared.input_linear.weight"), (24, 24))
    (note,) = said(groups.choices.notes)
    assert note == (
        "rows of sizes.fc1.weight are not cut, because the next layer reads half as many features as they write: if "
        "these are a gate and what it gates, give split_rows in patterns"
    )
    assert said(kernel.Muon(groups).explain().notes) == [note]
    patterns = {"sizes.fc1.weight": {"split_rows": (24, 24)}}
    assert not said(kernel.groups_for(model, patterns=patterns).choices.notes)
    whole = kernel.groups_for(model, gate_up=False)
    assert not any("split_rows" in group for group in whole)


class SwiGLU(nn.Module):
    """As timm's, with the gate in a layer of its own, and hidden features twice as many as others."""

    def __init__(self, order=("fc1_g", "fc1_x", "fc2")):
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(32, 16) if name == "fc2" else nn.Linear(16, 32))


class Odd(nn.Linear):
    """A linear layer that does not say what it reads."""

    def __init__(self):
        nn.Module.__init__(self)
        self.weight, self.bias = nn.Parameter(torch.zeros(16, 32)), None


def test_layers_that_read_the_same_are_no_gate(kernel):
    """The next layer reads as much as this one, and half as much as it writes, since both read the same."""
    beside = nn.ModuleDict({"a": nn.Linear(16, 32), "b": nn.Linear(16, 16), "c": nn.Linear(16, 16)})
    odd = nn.ModuleDict({"a": nn.Linear(16, 32), "b": Odd()})
    layers = {"block": beside, "mlp": SwiGLU(), "down": SwiGLU(("fc2", "fc1_g", "fc1_x")), "odd": odd}
    groups = kernel.groups_for(nn.ModuleDict({**layers, "out": nn.Linear(16, 8)}))
    assert not said(groups.choices.notes)
    assert not any("split_rows" in group for group in groups)


def test_a_remark_stays_until_all_that_it_asks_for_is_given(kernel):
    """Of this stack no size shows how it lies, so that it is not cut, either."""
    model = nn.ModuleDict({"ffn": Experts()})
    del model["ffn"].is_transposed, model["ffn"].down_proj
    groups, half = kernel.groups_for(model), model["ffn"].gate_up_proj.shape[2] // 2
    for settings, lines in (({}, 1), ({"transposed": True}, 1), ({"split_rows": (half, half)}, 0)):
        groups[0].update(settings)
        assert len(said(kernel.Muon(groups).explain().notes)) == lines


CHANGED = {
    "slice": lambda groups, others: groups[:1] + groups[1:],
    "copy": lambda groups, others: groups.copy(),
    "shallow copy": lambda groups, others: copy.copy(groups),
    "behind a list": lambda groups, others: groups + others,
    "before a list": lambda groups, others: others + groups,
    "longer": lambda groups, others: operator.iadd(groups, others),
}


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED.keys())
def test_slices_and_sums_of_groups_keep_the_remarks(kernel, changed):
    groups, others = kernel.groups_for(gates()), [{"params": [("b", nn.Parameter(torch.zeros(8)))]}]
    plain = changed(list(groups), others)
    combination = changed(groups, others)
    assert combination == plain and len(said(kernel.Muon(combination).explain().notes)) == 1


@pytest.mark.parametrize("add", [operator.add, operator.iadd])
def test_sums_of_groups_have_the_remarks_of_both_models_and_parts_their_own(kernel, add):
    """A model has a group of two weights, and one of its biases."""
    groups = add(kernel.groups_for(gates()), kernel.groups_for(gates("b")))
    for part, more in ((groups, [3]), (groups[:1], [1]), (groups[1:2], [])):
        lines = said(kernel.Muon(part).explain().notes)
        assert [f"and {count} more" in line for line, count in zip(lines, more, strict=True)] == [True] * len(more)


def test_weights_that_a_pattern_decides_are_not_remarked(kernel):
    groups = kernel.groups_for(gates(), patterns={"*_hh_*": {"split_rows": (16,) * 4}})
    (note,) = said(kernel.Muon(groups).explain().notes)
    assert note.startswith("rows of a.weight_ih_l0 are not cut")


def test_groups_are_added_to_lists_alone_and_a_longer_copy_leaves_them_as_they_are(kernel):
    groups = kernel.groups_for(gates())
    for other in ((), "a", {}):
        with pytest.raises(TypeError):
            other + groups
    longer = copy.copy(groups)
    longer += kernel.groups_for(gates("b"))
    assert len(longer.uncut) == 2 * len(groups.uncut) > 0
