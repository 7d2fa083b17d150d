"""Which rows belong to which head follows from names, shapes and a few settings, or is refused."""

import importlib

import pytest

LATENT = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}


@pytest.fixture(scope="module")
def attention(kernel):
    return importlib.import_module(".qk_clip.heads", kernel.__name__)


@pytest.fixture
def plan(attention):
    """Return a function of settings and shapes that returns the layers by each of their keys."""

    def layers_by_key(settings, shapes):
        layers = attention.attentions(attention.clip_settings(settings), shapes)
        return {key: layer for layer in layers for key in layer.keys}

    return layers_by_key


def pair(heads, keys=None, layer="layers.0.self_attn"):
    return {f"{layer}.q_proj.weight": (heads * 4, 8), f"{layer}.k_proj.weight": ((keys or heads) * 4, 8)}


def test_query_heads_share_key_heads_in_order(plan):
    of_q, of_k = plan({"head_dim": 4, "alpha": 0.25}, pair(4, 2))[0].weights.values()
    assert of_q == ((4, (0,), 0.25), (4, (1,), 0.25), (4, (2,), 0.25), (4, (3,), 0.25))
    assert of_k == ((4, (0, 1), 0.75), (4, (2, 3), 0.75))


def test_latent_attention_scales_rotary_queries_fully(plan):
    """Values are not scaled. A norm of queries comes before the weight, whatever its size."""
    rows = {"q_b_proj": (12, 12), "kv_b_proj": (14, 8), "q_norm": (12,)}
    shapes = {f"model.layers.3.self_attn.{name}.weight": shape for name, shape in rows.items()}
    of_q, of_kv = plan({**LATENT, "alpha": 0.25}, shapes)[3].weights.values()
    assert of_q == ((4, (0,), 0.25), (2, (0,), 1.0), (4, (1,), 0.25), (2, (1,), 1.0))
    assert of_kv == ((4, (0,), 0.75), (3, (0,), 0.0), (4, (1,), 0.75), (3, (1,), 0.0))


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv.weight", "blocks.0.self_attn.in_proj_weight", "0.attn.qkv_proj"])
@pytest.mark.parametrize("num_kv_heads, rows", [(0, 36), (3, 36), (1, 20)])
def test_fused_weight_is_queries_then_keys_then_values(plan, name, num_kv_heads, rows):
    keys = num_kv_heads or 3
    (fused,) = plan({"head_dim": 4, "num_kv_heads": num_kv_heads}, {name: (rows, 8)})[0].weights.values()
    of_q, of_k = plan({"head_dim": 4}, pair(3, keys))[0].weights.values()
    assert fused == (*of_q, *of_k, (keys * 4, (), 0.0)) and sum(run.rows for run in fused) == rows


@pytest.mark.parametrize("num_kv_heads, rows", [(0, 36), (1, 20)])
def test_a_fused_weight_by_head_is_the_queries_key_and_values_of_each_key_head(plan, num_kv_heads, rows):
    name, settings = "blocks.0.attn.qkv.weight", {"head_dim": 4, "alpha": 0.25, "by_head": True}
    (fused,) = plan({**settings, "num_kv_heads": num_kv_heads}, {name: (rows, 8)})[0].weights.values()
    values = (4, (), 0.0)
    if num_kv_heads:
        assert fused == (*((4, (i,), 0.25) for i in range(3)), (4, (0, 1, 2), 0.75), values)
    else:
        assert fused == tuple(run for i in range(3) for run in ((4, (i,), 0.25), (4, (i,), 0.75), values))


def test_biases_follow_their_weights(plan):
    """Heads are numbered through the layers."""
    others = {"layers.1.mlp.up.weight": (8, 8), "layers.1.attn.o_proj.bias": (8,)}
    biases = {"layers.1.attn.q_proj.bias": (12,), "layers.1.attn.k_proj.bias": (12,)}
    made = plan({"head_dim": 4}, {**pair(2), **pair(3, layer="layers.1.attn"), **others, **biases})
    first, second = made[0], made[1]
    assert (first.heads, first.first, second.heads, second.first) == (2, 0, 3, 2)
    assert set(second.weights) == {*pair(3, layer="layers.1.attn"), *biases}
    assert all(second.weights[name] == second.weights[name.replace("bias", "weight")] for name in biases)


@pytest.mark.parametrize("is_mla", [False, True])
def test_motif_indices_name_the_head_of_each_logit(plan, is_mla):
    """A head that several logits stand for takes the smallest factor; one that none stands for stays."""
    config = {"q_indices": [1, 0, 1], "k_indices": [0, 0, 0], "head_dim": 4, "threshold": 100, "is_mla": is_mla}
    latent = LATENT if is_mla else dict.fromkeys(LATENT, 0)
    shapes = {"wq_b": 18, "wkv_b": 7} if is_mla else {"wq": 12, "wk": 4}
    made = plan({**config, **latent}, {f"layers.7.attention.{name}.weight": (rows, 8) for name, rows in shapes.items()})
    of_q, of_k = made[7].weights.values()
    assert [run.heads for run in of_q if run.exponent == 0.5] == [(1,), (0, 2), ()]
    assert [run.heads for run in of_k if run.exponent == 0.5] == [(0, 1, 2)]


@pytest.mark.parametrize(
    "absent", [{}, {"q_indices": None}, {"k_indices": None}, {"q_indices": None, "k_indices": None}]
)
def test_indices_that_are_missing_or_none_have_their_defaults(plan, absent):
    """Logits belong to query heads in order, and to the key heads that these share."""
    defaults = {"q_indices": [0, 1, 2, 3], "k_indices": [0, 0, 1, 1]}
    expected = plan({"head_dim": 4}, pair(4, 2))
    for key in (*defaults, None):
        indices = {} if key is None else {key: defaults[key]}
        assert plan({"head_dim": 4, **absent, **indices}, pair(4, 2)) == expected


def test_keys_follow_the_queries_whose_logits_have_another_order(plan):
    of_q, of_k = plan({"head_dim": 4, "q_indices": [3, 0]}, pair(4, 2))[0].weights.values()
    assert [run.heads for run in of_q] == [(1,), (), (), (0,)]
    assert [run.heads for run in of_k] == [(1,), (0,)]


def test_motifs_default_configuration_scales_nothing(plan):
    made = plan({"q_indices": [], "k_indices": [], "head_dim": 4, "threshold": 100}, pair(2))
    assert not any(run.heads for runs in made[0].weights.values() for run in runs)


@pytest.mark.parametrize(
    "layers, keys", [({"cross": ("to_q", "to_k")}, ["cross"]), ([["to_q", "to_k"]], [0]), ((("to_q", "to_k"),), [0])]
)
def test_layers_can_be_given_by_names(plan, layers, keys):
    shapes = {"a": (8, 8), "b": (3, 3), "to_q": (8, 8), "to_k": (8, 8)}
    made = plan({"head_dim": 4, "layers": layers}, shapes)
    assert list(made) == keys and list(made[keys[0]].weights) == ["to_q", "to_k"]


def test_layers_sharing_a_number_are_known_only_by_name(plan):
    shapes = {**pair(2, layer="encoder.0.attn"), **pair(2, layer="decoder.0.attn"), **pair(2, layer="decoder.1.attn")}
    assert set(plan({"head_dim": 4}, shapes)) == {"encoder.0.attn", "decoder.0.attn", "decoder.1.attn", 1}


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"head_dims": 4}, ValueError, r"no keys \['head_dims'\], only alpha"),
        ({"threshold": 0, "head_dim": 4}, ValueError, "threshold of qk_clip must be above 0, got 0"),
        ({"threshold": float("nan"), "head_dim": 4}, ValueError, "threshold of qk_clip must be .* below inf, got nan"),
        ({"threshold": float("inf"), "head_dim": 4}, ValueError, "threshold of qk_clip must be .* below inf, got inf"),
        ({"alpha": 1.5, "head_dim": 4}, ValueError, "alpha of qk_clip must be at most 1, got 1.5"),
        ({"alpha": -1, "head_dim": 4}, ValueError, "alpha of qk_clip must be at least 0 .* got -1"),
        ({}, ValueError, "needs head_dim"),
        ({"head_dim": 4.0}, ValueError, "whole number"),
        ({"head_dim": True}, ValueError, "head_dim of qk_clip must be a whole number of at least 0, got True"),
        ({"qk_nope_head_dim": 4}, ValueError, "needs qk_nope_head_dim, qk_rope_head_dim, v_head_dim"),
        ({"head_dim": 4, "is_mla": True}, ValueError, "needs qk_nope_head_dim"),
        ({"head_dim": 4, "layers": [("q", "k", "v")]}, ValueError, "fused weight, or query and key"),
        ({"head_dim": 4, "layers": []}, ValueError, "fused weight, or query and key"),
        ({"head_dim": 4, "layers": [()]}, ValueError, "fused weight, or query and key"),
        ({"head_dim": 4, "by_head": 1}, TypeError, "by_head of qk_clip must be True or False, got 1"),
        ([("head_dim", 4)], TypeError, "must be a dict of settings, got list"),
        ({"head_dim": 4, 5: 1, "a": 2}, ValueError, r"no keys \['5', 'a'\], only alpha"),
        ({"threshold": "100", "head_dim": 4}, TypeError, "threshold of qk_clip must be a number, got '100'"),
        ({"threshold": True, "head_dim": 4}, TypeError, "threshold of qk_clip must be a number, got True"),
        ({"threshold": None, "head_dim": 4}, TypeError, "threshold of qk_clip must be a number, got None"),
        ({"alpha": [0.5], "head_dim": 4}, TypeError, r"alpha of qk_clip must be a number, got \[0\.5\]"),
        ({"is_mla": "no", "head_dim": 4}, TypeError, "is_mla of qk_clip must be True or False, got 'no'"),
        ({"q_indices": 5, "head_dim": 4}, TypeError, "q_indices of qk_clip must be numbers of heads, got 5"),
        ({"q_indices": [-1], "head_dim": 4}, ValueError, "q_indices of qk_clip must be .* at least 0, got -1"),
        ({"k_indices": "01", "head_dim": 4}, TypeError, "k_indices of qk_clip must be numbers of heads, got '01'"),
        ({"k_indices": [None], "head_dim": 4}, ValueError, "k_indices of qk_clip must be a whole number .* got None"),
        ({"layers": 5, "head_dim": 4}, TypeError, "layers of qk_clip must be a sequence or a dict .* got 5"),
        ({"layers": "qk", "head_dim": 4}, TypeError, "layers of qk_clip must be a sequence or a dict .* got 'qk'"),
        ({"layers": [None], "head_dim": 4}, TypeError, "layers of qk_clip must .* names or positions, got None"),
        ({"layers": [("q", None)], "head_dim": 4}, TypeError, r"must .* names or positions, got \('q', None\)"),
        ({"layers": [(True, False)], "head_dim": 4}, TypeError, r"must .* names or positions, got \(True, False\)"),
        ({"layers": {None: "qkv"}, "head_dim": 4}, TypeError, "layers of qk_clip must have names or numbers .* None"),
    ],
)
def test_impossible_settings_are_refused(attention, settings, error, message):
    with pytest.raises(error, match=message):
        attention.clip_settings(settings)


# Magnitudes and directions, which is what torch's weight norm makes of a weight: it keeps the rows' norms apart.
WEIGHT_NORM = {
    f"a.{role}.parametrizations.weight.original{i}": (8, cols)
    for role in ("q_proj", "k_proj")
    for i, cols in enumerate((1, 8))
}
# loralib's, where the frozen weights are in no optimizer. A factor's rows are no heads.
LORA = {f"a.{role}.lora_{factor}": (8, 8) for role in ("q_proj", "k_proj") for factor in "AB"}
# Heads one after the other, though indices say that two of three queries share the first of two keys.
BY_INDEX = {"head_dim": 4, "num_kv_heads": 2, "by_head": True, "q_indices": [0, 1, 2], "k_indices": [0, 0, 1]}


@pytest.mark.parametrize(
    "settings, shapes, message",
    [
        ({"head_dim": 4}, {"mlp.up.weight": (8, 8)}, "finds no query and key weights"),
        ({"head_dim": 4}, WEIGHT_NORM, "finds no query and key weights"),
        ({"head_dim": 4}, LORA, "finds no query and key weights"),
        ({"head_dim": 4}, {"a.q_proj.weight": (8, 8)}, "one fused weight, or query and key, in 'a'"),
        ({"head_dim": 3}, pair(2), r"whole heads of 3 rows in layers\.0\.self_attn\.q_proj\.weight"),
        ({"head_dim": 4}, pair(3, 2), "3 query heads .* cannot share 2 key heads"),
        ({"head_dim": 4}, {"a.qkv.weight": (16, 8)}, r"needs num_kv_heads for a\.qkv\.weight, which has 4 heads"),
        ({"head_dim": 4, "num_kv_heads": 3}, {"a.qkv.weight": (20, 8)}, "cannot share 3 key heads"),
        ({"head_dim": 4, "num_kv_heads": 2}, {"a.qkv.weight": (16, 8)}, "the 0 query heads .* cannot share 2"),
        ({**LATENT, "layers": [("q", "k")]}, {"q": (12,), "k": (14,)}, r"heads of 6 rows in q, whose shape is \(12,\)"),
        ({"head_dim": 4, "layers": [("q", "k")]}, {"q": (8,), "k": (8, 8)}, r"of 4 rows in q, whose shape is \(8,\)"),
        (LATENT, {"a.qkv.weight": (42, 8)}, "needs a query and a key weight for latent attention"),
        ({"head_dim": 4, "layers": [("q", "k")]}, {"q": (8, 8)}, r"not parameters: \['k'\]"),
        ({"head_dim": 4, "layers": [("q", "q")]}, {"q": (8, 8)}, "q is in several"),
        ({"head_dim": 4, "q_indices": [2]}, pair(2), r"^q_indices of qk_clip .* heads below 2, got \(2,\)"),
        ({"head_dim": 4, "k_indices": [0, 1, 1]}, pair(2), "^k_indices of qk_clip .* at most 2 heads"),
        (BY_INDEX, {"a.qkv.weight": (28, 8)}, r"3 query heads of a\.qkv\.weight cannot share 2 key heads evenly"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(plan, settings, shapes, message):
    with pytest.raises(ValueError, match=message):
        plan(settings, shapes)


def test_what_lies_beside_a_weight_in_its_module_is_not_the_weight(plan):
    """As the mask of a pruned one, in either order. The number of a layer is the last one in its name."""
    weights, mask = pair(2, layer="towers.0.layers.3.attn"), {"towers.0.layers.3.attn.q_proj.mask": (8, 8)}
    for shapes in ({**weights, **mask}, {**mask, **weights}):
        layers = plan({"head_dim": 4}, shapes)
        assert set(layers) == {"towers.0.layers.3.attn", 3} and set(layers[3].weights) == set(weights)


@pytest.mark.parametrize("name, shape", [("stem.qkv.weight", (24, 8, 1, 1)), ("stem.qkv.net.0.weight", (24, 8))])
def test_convolutions_and_layers_inside_a_module_of_such_a_name_are_not_found(plan, name, shape):
    """Nobody has said that their rows are heads, and others can be clipped all the same."""
    assert plan({"head_dim": 4}, {**pair(2), name: shape}) == plan({"head_dim": 4}, pair(2))


def test_a_layer_has_its_modules_name_with_and_without_wrappers(plan):
    layers = plan({"head_dim": 4}, pair(2, layer="_orig_mod.layers.3.attn"))
    assert set(layers) == {"layers.3.attn", "_orig_mod.layers.3.attn", 3}
