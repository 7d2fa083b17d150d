"""Which stacks of experts `groups_for` cuts and turns, and what it says where nothing tells."""

import pytest
import torch
from torch import nn

from tests.support.model_of_many_kinds import Experts, chosen


def test_experts_that_lie_otherwise_are_transposed_and_whole_where_gate_and_up_alternate(kernel):
    """As gpt-oss has them."""
    groups = kernel.groups_for(nn.ModuleDict({"ffn": Experts(transposed=True, concatenated=False)}))
    assert chosen(groups) == {
        "ffn.gate_up_proj": "experts: gate and up: 4 matrices 32x24 transposed",
        "ffn.down_proj": "experts: 4 matrices 24x16 transposed",
    }
    (note,) = groups.choices.notes
    assert note == "experts: gate and up of ffn.gate_up_proj are not cut, because their rows alternate"


@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_tell_how_experts_lie_where_their_module_does_not(kernel, transposed):
    """Llama 4's are (E, in, out), and do not say so: cut as (E, out, in), halves of the inputs would be matrices."""
    model = nn.ModuleDict({"ffn": Experts(transposed)})
    del model["ffn"].is_transposed
    turned = " transposed" if transposed else ""
    assert chosen(kernel.groups_for(model)) == {
        "ffn.gate_up_proj": f"experts: gate and up: 4 matrices 32x24{turned} split 16+16",
        "ffn.down_proj": f"experts: 4 matrices 24x16{turned}",
    }


def test_a_module_that_says_how_its_experts_lie_needs_no_sizes(kernel):
    """Also against them, where both ways have them."""
    model = nn.ModuleDict({"ffn": Experts(transposed=True)})
    del model["ffn"].down_proj
    groups = kernel.groups_for(model)
    assert chosen(groups) == {"ffn.gate_up_proj": "experts: gate and up: 4 matrices 32x24 transposed split 16+16"}
    assert groups.choices.notes == []


def bank(name, *shape, kind="Bank", **attributes):
    """A model of a module of the class `kind`, with one parameter."""
    module = type(kind, (nn.Module,), {})()
    module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    vars(module).update(attributes)
    return nn.ModuleDict({"ffn": module})


TELLING = {"num_experts": {"num_experts": 48}, "n_experts": {"n_experts": 48}, "local": {"num_local_experts": 48}}
TELLING["class"] = {"kind": "FusedExperts"}


@pytest.mark.parametrize("case", TELLING)
def test_a_modules_class_or_number_of_experts_tells_that_a_parameter_is_a_stack(kernel, case):
    """Whatever it is called, unless that says `conv`."""
    assert chosen(kernel.groups_for(bank("bank", 48, 32, 24, **TELLING[case]))) == {
        "ffn.bank": "experts: 48 matrices 32x24"
    }
    assert chosen(kernel.groups_for(bank("conv", 48, 16, 3, **TELLING[case]))) == {
        "ffn.conv": "convolution: flatten 48x48"
    }


def test_as_many_matrices_as_gate_and_up_are_not_are_asked_about(kernel):
    """Three matrices with the name of a fused gate and up, of which nothing says that they are experts."""
    (note,) = kernel.groups_for(bank("w13", 3, 24, 16)).choices.notes
    assert "ffn.w13 (3, 24, 16): stacks of matrices, or convolutions?" in note


def test_experts_that_nothing_tells_of_are_not_cut(kernel):
    model = nn.ModuleDict({"ffn": Experts()})
    del model["ffn"].is_transposed, model["ffn"].down_proj
    groups = kernel.groups_for(model)
    assert chosen(groups) == {"ffn.gate_up_proj": "experts: gate and up: 4 matrices 32x24"}
    (note,) = groups.choices.notes
    assert note.endswith(
        "not cut, and assumed to be (E, out, in), because no sizes show it: give transposed and split_rows in patterns"
    )


def test_experts_of_which_nothing_tells_how_they_lie_are_remarked(kernel):
    """Also those that have no parts: `transposed` decides which side of them is the rows."""
    model = nn.ModuleDict({"experts": nn.ParameterDict({"w1": torch.zeros(4, 32, 24)})})
    (note,) = kernel.groups_for(model).choices.notes
    assert note == (
        "experts of experts.w1 are assumed to be (E, out, in), because no sizes show it: give transposed in patterns"
    )


def test_all_that_nothing_tells_of_a_stack_is_remarked(kernel):
    model = nn.ModuleDict({"ffn": Experts(concatenated=False)})
    del model["ffn"].is_transposed, model["ffn"].down_proj
    (note,) = kernel.groups_for(model).choices.notes
    assert (
        "are not cut, because their rows alternate, and are assumed to be (E, out, in), because no sizes show it"
        in note
    )


def test_rows_of_gpt_oss_alternate_where_its_class_does_not_say_so(kernel):
    """As in transformers 4: `gate_up[..., ::2]` is the gate."""

    class GptOssExperts(Experts):
        pass

    model = nn.ModuleDict({"ffn": GptOssExperts(transposed=True)})
    del model["ffn"].is_concatenated
    groups = kernel.groups_for(model)
    assert chosen(groups)["ffn.gate_up_proj"] == "experts: gate and up: 4 matrices 32x24 transposed"
    assert groups.choices.notes == [
        "experts: gate and up of ffn.gate_up_proj are not cut, because their rows alternate"
    ]


def test_gate_and_up_in_an_unknown_order_are_not_cut(kernel):
    """`w13` of torchtitan alternates, or lies as a stack; a module may say that its halves are gate and up."""
    model = nn.ModuleDict({"ffn": nn.Module()})
    model["ffn"].w13 = nn.Linear(16, 48, bias=False)
    groups = kernel.groups_for(model)
    assert chosen(groups) == {"ffn.w13.weight": "gate and up"}
    (note,) = groups.choices.notes
    assert "differ in the order of the rows of w13" in note and "give split_rows in patterns" in note
    assert kernel.groups_for(model, gate_up=False).choices.notes == []
    model["ffn"].w13.is_concatenated = True
    groups = kernel.groups_for(model)
    assert chosen(groups) == {"ffn.w13.weight": "gate and up: 48x16 split 24+24"} and not groups.choices.notes


def test_gate_beside_up_is_a_stack_of_two(kernel):
    model = nn.ModuleDict({"ffn": nn.Module()})
    model["ffn"].w13 = nn.Parameter(torch.zeros(2, 24, 16))
    groups = kernel.groups_for(model)
    assert chosen(groups) == {"ffn.w13": "gate and up: 2 matrices 24x16"} and not groups.choices.notes


class Routed(nn.Module):
    """Experts by the number of them alone, fused as (experts, 2 rows, cols) or as (experts, 2, rows, cols)."""

    def __init__(self, *fused):
        super().__init__()
        self.num_experts = fused[0]
        self.w13, self.w2 = nn.Parameter(torch.zeros(fused)), nn.Parameter(torch.zeros(fused[0], 16, 24))


def test_gates_beside_ups_of_experts_are_matrices_each_whatever_their_module_is_called(kernel):
    """Where they are fused, two experts are no gate beside up."""
    groups = kernel.groups_for(nn.ModuleDict({"mlp": Routed(8, 2, 24, 16)}))
    assert chosen(groups) == {
        "mlp.w13": "experts: gate and up: 16 matrices 24x16", "mlp.w2": "experts: 8 matrices 16x24",
    }  # fmt: skip
    assert not any("order of the rows" in note for note in groups.choices.notes)
    groups = kernel.groups_for(nn.ModuleDict({"mlp": Routed(2, 48, 16)}))
    assert chosen(groups)["mlp.w13"] == "experts: gate and up: 2 matrices 48x16"
    assert [note for note in groups.choices.notes if "differ in the order of the rows of w13" in note]


def test_experts_without_a_gate_are_whole(kernel):
    """Their modules say by `has_gate` that the weight, in spite of its name, is one matrix."""
    model = nn.ModuleDict({"ffn": Experts()})
    model["ffn"].has_gate = False
    groups = kernel.groups_for(model)
    assert chosen(groups)["ffn.gate_up_proj"] == "experts: 4 matrices 32x24" and not groups.choices.notes


def test_a_stack_or_convolution_that_a_parameter_asks_muon_for_is_not_guessed(kernel):
    model = nn.Module()
    model.bank = nn.Parameter(torch.zeros(4, 32, 48))
    model.bank.use_muon = True
    with pytest.raises(ValueError, match=r"asked for bank \(4, 32, 48\), which may be a stack"):
        kernel.groups_for(model)
    groups = kernel.groups_for(model, patterns={"bank": {"stacked": True}})
    assert [row.matrices for row in groups.choices.rows] == [4]


class StateSpace(nn.Module):
    """The weights of Mamba's mixer: gate, x, B, C and time steps in one, time steps, B and C in another."""

    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.ones(8, 4))
        self.in_proj, self.x_proj = nn.Linear(16, 40), nn.Linear(16, 12)


class Plain(nn.Module):
    """The same names without a state space."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.x_proj = nn.Linear(16, 40), nn.Linear(16, 12)


@pytest.mark.parametrize(
    "inner, words",
    [
        (StateSpace(), "rows of a.in_proj.weight and 1 more are not cut, because state space models differ"),
        (nn.LSTM(8, 16), "rows of a.weight_ih_l0 and 1 more are not cut, because gates of recurrent layers"),
        (nn.GRUCell(8, 16), "rows of a.weight_ih and 1 more are not cut, because gates of recurrent layers"),
        (nn.RNN(8, 16), None),
        (Plain(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_fused_weights_that_are_not_cut_are_remarked(kernel, inner, words):
    notes = kernel.groups_for(nn.ModuleDict({"a": inner})).choices.notes
    assert [note.startswith(words) for note in notes] == [True] if words else not notes
    assert kernel.groups_for(nn.ModuleDict({"a": inner}), patterns={"a.*": {}}).choices.notes == []
