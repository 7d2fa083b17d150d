"""Tables, heads and patch embeddings of the real models of PEFT, timm, torchvision and transformers, by hand.

`make test-integrations` installs what this needs, in a folder of its own.
"""

import pytest
import torch

from tests.support.torchvision_operators import declare_missing

pytestmark = pytest.mark.integrations

LLAMA = dict(
    hidden_size=48, vocab_size=96, num_hidden_layers=1, intermediate_size=80, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
# The place that PEFT gives to what was in the model.
IN = "base_model.model."


def outer(rows):
    """What is a matrix by its shape, and no hidden one by its role."""
    kinds = ("embedding", "output_head")
    return {row.name: row.reason for row in rows if row.branch != "muon" and row.reason.startswith(kinds)}


def by_name(kernel, model):
    named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    return kernel.route(named).rows


def llama(transformers, **sizes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **sizes))


# By hand: the adapter, and what it trains that is no hidden matrix.
ADAPTERS = {
    "modules_to_save": (
        dict(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
        {
            f"{IN}model.embed_tokens.modules_to_save.default.weight": "embedding",
            f"{IN}lm_head.modules_to_save.default.weight": "output_head",
        },
    ),
    "factors of tables": (
        dict(target_modules=["q_proj", "embed_tokens", "lm_head"]),
        {
            f"{IN}model.embed_tokens.lora_embedding_A.default": "embedding",
            f"{IN}model.embed_tokens.lora_embedding_B.default": "embedding",
            f"{IN}lm_head.lora_A.default.weight": "output_head",
            f"{IN}lm_head.lora_B.default.weight": "output_head",
        },
    ),
    "tokens": (
        dict(target_modules=["q_proj"], trainable_token_indices=list(range(8))),
        {f"{IN}model.embed_tokens.token_adapter.trainable_tokens_delta.default": "embedding"},
    ),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_hide_no_table_and_no_head(kernel, transformers, case):
    """By module, and by name alone."""
    peft = pytest.importorskip("peft")
    options, expected = ADAPTERS[case]
    model = peft.get_peft_model(llama(transformers), peft.LoraConfig(r=8, **options))
    rows = kernel.groups_for(model).choices.rows
    assert outer(rows) == expected
    assert {name: reason.split(":")[0] for name, reason in outer(by_name(kernel, model)).items()} == expected
    assert {row.reason for row in rows if "q_proj.lora" in row.name} == {"lora:a", "lora:b"}


def test_head_of_a_classifier_under_an_adapter(kernel, transformers):
    peft = pytest.importorskip("peft")
    sizes = {**LLAMA, "num_labels": 10}
    sizes.pop("num_key_value_heads")
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    model = peft.get_peft_model(bert, peft.LoraConfig(task_type="SEQ_CLS", r=8))
    expected = {f"{IN}classifier.modules_to_save.default.weight"}
    assert outer(kernel.groups_for(model).choices.rows).keys() == outer(by_name(kernel, model)).keys() == expected


@pytest.mark.parametrize("name", ["LlamaModel", "BertModel", "GPT2Model", "CLIPModel"])
def test_models_without_a_head_have_none(kernel, transformers, name):
    """Their last linear layer is a hidden one, or a projection beside another."""
    config = getattr(transformers, f"{name.removesuffix('Model')}Config")
    with torch.device("meta"):
        model = getattr(transformers, name)(config())
    assert not [row for row in kernel.groups_for(model).choices.rows if row.reason.startswith("output_head")]


# Models of each library, with the names of all that is a table, a patch embedding or a head.
VIT = {"pos_embed": "embedding", "patch_embed.proj.weight": "embedding"}
VISION = {
    "timm": {
        "vit_tiny_patch16_224": {**VIT, "head.weight": "output_head"},
        "deit_tiny_distilled_patch16_224": {**VIT, "head.weight": "output_head", "head_dist.weight": "output_head"},
        "vit_small_r26_s32_224": {**VIT, "head.weight": "output_head"},  # whose patches come from a network
        "resnet18": {"fc.weight": "output_head"},
        "mobilenetv3_small_100": {"classifier.weight": "output_head"},
        "convnext_atto": {"head.fc.weight": "output_head"},
        "mixer_s32_224": {"stem.proj.weight": "embedding", "head.weight": "output_head"},
        "levit_128s": {"head.linear.weight": "output_head", "head_dist.linear.weight": "output_head"},
        "pvt_v2_b0": {"patch_embed.proj.weight": "embedding", "head.weight": "output_head"},
    },
    "torchvision": {
        "resnet18": {"fc.weight": "output_head"},
        "vgg11": {"classifier.6.weight": "output_head"},
        "alexnet": {"classifier.6.weight": "output_head"},
        "mobilenet_v3_small": {"classifier.3.weight": "output_head"},
        "convnext_tiny": {"classifier.2.weight": "output_head"},
        "vit_b_16": {
            "conv_proj.weight": "embedding",
            "encoder.pos_embedding": "embedding",
            "heads.head.weight": "output_head",
        },
    },
}


def made(library, name):
    declare_missing()
    module = pytest.importorskip(library)
    with torch.device("meta"):
        return module.create_model(name) if library == "timm" else module.models.get_model(name)


@pytest.mark.parametrize("library, name", [(library, name) for library in VISION for name in VISION[library]])
def test_vision_models_have_one_head_and_one_patch_embedding(kernel, library, name):
    """By module; by name alone no less stays with AdamW."""
    model = made(library, name)
    assert outer(kernel.groups_for(model).choices.rows) == VISION[library][name]
    muon = {row.name for row in by_name(kernel, model) if row.branch == "muon"}
    assert not muon & VISION[library][name].keys()


def test_vision_models_without_classes_have_no_head(kernel):
    declare_missing()
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    assert outer(kernel.groups_for(model).choices.rows) == VIT
