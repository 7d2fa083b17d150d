"""Groups from a model: what its modules and sizes say of each weight, and what users say of other models'."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.model_of_many_kinds import NETWORK, Conv1D, Network, chosen
from tests.support.small_model import take_steps


def test_modules_and_sizes_say_what_each_weight_is(kernel):
    """Names alone would not: `tok` is a table, `ffn` has stacks of experts, and `signal` is a convolution."""
    assert chosen(kernel.groups_for(Network())) == NETWORK


def test_the_optimizer_explains_what_was_chosen_and_steps(kernel):
    model = Network()
    groups = kernel.groups_for(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = kernel.Muon(groups, lr=0.1)
    assert {row.name: row.reason for row in optimizer.explain().rows} == NETWORK
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in named.items()}
    take_steps(optimizer, named, range(2))
    assert not any(torch.equal(p, before[name]) for name, p in named.items())
    assert str(groups).splitlines()[0].split()[:4] == ["name", "shape", "branch", "reason"]


def test_each_trainable_parameter_is_in_one_group_with_its_role(kernel):
    model = Network()
    groups = kernel.groups_for(model)
    members = [(name, p) for group in groups for name, p in group["params"]]
    assert sorted(name for name, _ in members) == sorted(NETWORK)
    assert all(p is model.get_parameter(name) for name, p in members)
    assert all(len({NETWORK[name].split(":")[0] for name, _ in group["params"]}) == 1 for group in groups)
    roles = {group["role"]: group for group in groups}
    assert roles["vector"]["weight_decay"] == 0.0 and "weight_decay" not in roles["embedding"]


def test_roles_set_learning_rates(kernel):
    groups = kernel.groups_for(Network())
    for group in groups:
        group["lr"] = 0.5 if group["role"] == "embedding" else 0.1
    rates = {group["role"]: group["lr"] for group in kernel.Muon(groups).param_groups}
    assert rates.pop("embedding") == 0.5 and set(rates.values()) == {0.1}


@pytest.mark.parametrize(
    "options, qkv, gate_up",
    [
        (dict(heads=False), "72x24 split 24+24+24", "32x24 split 16+16"),
        (dict(gate_up=False), "72x24 split 9*8", "32x24"),
    ],
    ids=str,
)
def test_less_may_be_cut(kernel, options, qkv, gate_up):
    reasons = chosen(kernel.groups_for(Network(), **options))
    assert reasons["attn.c_attn.weight"] == f"queries, keys and values: {qkv}"
    assert reasons["ffn.gate_up_proj"] == f"experts: gate and up: 4 matrices {gate_up}"


def test_an_attribute_of_a_parameter_goes_before_its_module(kernel):
    model = Network()
    model.tok.weight.use_muon = True
    model.attn.c_proj.weight.use_muon = False
    rows = {row.name: (row.branch, row.reason) for row in kernel.groups_for(model).choices.rows}
    assert rows["tok.weight"] == ("muon", "use_muon") and rows["attn.c_proj.weight"] == ("adamw", "use_muon")


def test_transformers_linear_layers_are_transposed(kernel):
    model = nn.ModuleDict({"attn": nn.ModuleDict({"c_attn": Conv1D(72, 24)}), "mlp": Conv1D(48, 24)})
    reasons = chosen(kernel.groups_for(model, config=SimpleNamespace(n_embd=24, n_head=3)))
    assert reasons == {
        "attn.c_attn.weight": "queries, keys and values: 72x24 transposed split 9*8",
        "mlp.weight": "matrix: 48x24 transposed",
    }


def test_columns_of_transposed_weights_are_heads_and_the_larger_side_is_that_of_outputs(kernel):
    """As GPT-2's: from a model, and by hand in groups, whose multiplier is that of the `Linear` of the same layer."""
    model = nn.ModuleDict({"attn": nn.ModuleDict({"c_attn": Conv1D(72, 24)}), "mlp": Conv1D(96, 24)})
    by_hand = [
        {"params": [("attn.c_attn.weight", model["attn"]["c_attn"].weight)], "split_rows": (8,) * 9},
        {"params": [("mlp.weight", model["mlp"].weight)]},
    ]
    by_hand = [{**group, "transposed": True} for group in by_hand]
    for groups in (kernel.groups_for(model, config=SimpleNamespace(n_embd=24, n_head=3)), by_hand):
        optimizer = kernel.Muon(groups, adjust_lr_fn="original")
        rows = {row.name: (row.matrices, row.multiplier) for row in optimizer.explain().rows}
        # sqrt(max(1, outputs / inputs)): of heads of 8 outputs and 24 inputs 1, of 96 and 24 2.
        assert rows == {"attn.c_attn.weight": (9, 1.0), "mlp.weight": (1, 2.0)}


def test_torchs_attention_is_cut_by_head(kernel):
    reasons = chosen(kernel.groups_for(nn.TransformerEncoderLayer(32, 4, 64)))
    assert reasons["self_attn.in_proj_weight"] == "queries, keys and values: 96x32 split 12*8"
    assert reasons["self_attn.out_proj.weight"] == reasons["linear1.weight"].split(":")[0] == "matrix"


def test_torchs_attention_with_keys_of_another_width_is_cut_by_head(kernel):
    attention = nn.MultiheadAttention(32, 4, kdim=16, vdim=24, bias=False)
    assert chosen(kernel.groups_for(attention)) == {
        "q_proj_weight": "queries: 32x32 split 4*8",
        "k_proj_weight": "keys: 32x16 split 4*8",
        "v_proj_weight": "values: 32x24 split 4*8",
        "out_proj.weight": "matrix",
    }


def linears(**shapes):
    """A model whose modules have these names and shapes (out, in)."""
    model = nn.Module()
    for name, (outputs, inputs) in shapes.items():
        *path, leaf = name.split("__")
        parent = model
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(leaf, nn.Linear(inputs, outputs, bias=False))
    return model


def test_grouped_queries_and_a_single_key_head(kernel):
    model = linears(attn__q_proj=(32, 24), attn__k_proj=(16, 24), attn__v_proj=(8, 24), attn__qkv=(48, 24))
    config = SimpleNamespace(head_dim=8, num_attention_heads=4)
    assert chosen(kernel.groups_for(model, config=config)) == {
        "attn.q_proj.weight": "queries: 32x24 split 4*8",
        "attn.k_proj.weight": "keys: 16x24 split 8+8",
        "attn.v_proj.weight": "values",
        "attn.qkv.weight": "queries, keys and values: 48x24 split 6*8",
    }
    fused = chosen(kernel.groups_for(model, config=config, heads=False))["attn.qkv.weight"]
    assert fused == "queries, keys and values: 48x24 split 32+8+8"


def test_head_size_and_number_of_heads_may_be_told_apart(kernel):
    """As Phi-3's: the attention tells the size of a head, the config how many there are."""
    model = linears(attn__qkv_proj=(48, 24))
    model.attn.head_dim = 8
    groups = kernel.groups_for(model, heads=False, config=SimpleNamespace(num_attention_heads=4))
    assert chosen(groups) == {"attn.qkv_proj.weight": "queries, keys and values: 48x24 split 32+8+8"}
    assert groups.choices.notes == []


def test_weights_whose_heads_lie_together_are_always_cut_by_head(kernel):
    """GPT-NeoX's rows are head after head, each with its query, key and value."""
    model = linears(attention__query_key_value=(72, 24))
    for heads in (True, False):
        reasons = chosen(kernel.groups_for(model, heads=heads, config=SimpleNamespace(head_dim=8)))
        assert reasons == {"attention.query_key_value.weight": "queries, keys and values: 72x24 split 9*8"}


@pytest.mark.parametrize(
    "config, remark",
    [(None, "no head size is known"), (SimpleNamespace(head_dim=10), "heads of 10 rows do not divide its row count")],
)
def test_what_cannot_be_cut_is_whole_and_said(kernel, config, remark):
    groups = kernel.groups_for(linears(a__attn__q_proj=(32, 24), b__attn__q_proj=(32, 24)), config=config)
    assert set(chosen(groups).values()) == {"queries"}
    (note,) = groups.choices.notes
    assert note.startswith(f"queries of a.attn.q_proj.weight and 1 more are not cut, because {remark}")


def test_names_of_attentions_elsewhere_mean_nothing(kernel):
    model = linears(memory__key=(32, 24), memory__value=(32, 24))
    assert set(chosen(kernel.groups_for(model, config=SimpleNamespace(head_dim=8))).values()) == {"matrix"}


def test_a_model_is_needed(kernel):
    with pytest.raises(TypeError, match=r"groups_for needs a model, .* got list"):
        kernel.groups_for(list(Network().parameters()))


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(heads="False"), "heads must be True or False, got 'False'"),
        (dict(gate_up="x"), "gate_up must be True or False, got 'x'"),
        (dict(gate_up=None), "gate_up must be True or False, got None"),
        (dict(config=5), "config must be an object or a dict with sizes, or None, got 5"),
        (dict(config="gpt2"), "config must be an object or a dict with sizes, or None, got 'gpt2'"),
        (dict(config=[4]), r"config must be an object or a dict with sizes, or None, got \[4\]"),
    ],
    ids=str,
)
def test_options_of_another_kind_are_refused(kernel, options, words):
    with pytest.raises(TypeError, match=words):
        kernel.groups_for(Network(), **options)


def test_a_dict_is_a_config_as_an_object_is(kernel):
    """Given, or as the attribute of a module."""
    config, model = dict(head_dim=8, num_attention_heads=4), linears(attn__q_proj=(32, 24))
    expected = {"attn.q_proj.weight": "queries: 32x24 split 4*8"}
    assert chosen(kernel.groups_for(model, config=config)) == expected
    model.config = config
    assert chosen(kernel.groups_for(model)) == expected


def test_models_say_which_module_makes_logits(kernel):
    """As transformers' do, by the method `get_output_embeddings`; its name need not be a head's."""
    model = linears(words=(40, 24), up=(48, 24))
    assert set(chosen(kernel.groups_for(model)).values()) == {"matrix"}
    model.get_output_embeddings = lambda: model.words
    assert chosen(kernel.groups_for(model)) == {"words.weight": "output_head", "up.weight": "matrix"}


def test_groups_of_a_checkpoint_continue(kernel):
    """They are the same for the same model, and their values are plain."""
    models = [Network(), Network()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [kernel.Muon(kernel.groups_for(model), lr=0.1) for model in models]
    first, second = ({n: p for n, p in model.named_parameters() if p.requires_grad} for model in models)
    take_steps(optimizers[0], first, range(2))
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for optimizer, params in zip(optimizers, (first, second)):
        take_steps(optimizer, params, range(2, 4))
    assert all(torch.equal(p, second[name]) for name, p in first.items())


def test_frozen_parameters_are_left_out_and_counted(kernel):
    """They would not be trained later, whoever unfreezes them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    assert not any("frozen" in note for note in kernel.groups_for(model).choices.notes)
    model[2].requires_grad_(False)
    groups = kernel.groups_for(model)
    assert any(
        "left out (2, the first is 2.weight): to train some" in note for note in groups.choices.notes
    ) and "(2, " in str(groups)


def test_a_router_is_known_by_its_class(kernel):
    """Whatever its weight is called."""

    class TopKRouter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 24))

    model = nn.ModuleDict({"select": TopKRouter(), "mlp": nn.ModuleDict({"up": nn.Linear(24, 24, bias=False)})})
    groups = kernel.groups_for(nn.ModuleDict({"layers": nn.ModuleList([model]), "head": nn.Linear(24, 40, bias=False)}))
    assert chosen(groups)["layers.0.select.weight"] == "router"
