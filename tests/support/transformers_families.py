"""Tiny models of transformers' families, and, made by hand, what each of their weights is for `groups_for`.

Sizes that could be taken for each other differ: models are 48 wide, their heads have 8, 12 or 16 rows, and their
vocabulary has 96 words. Tables have one line for each kind of weight, under the end of its name; every other parameter
has no two dimensions longer than one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Family(NamedTuple):
    """How a model is made of the module `transformers`, and what its weights are."""

    make: Callable[[Any], Any]
    weights: dict[str, str]


WIDE = dict(hidden_size=48, vocab_size=96, num_hidden_layers=2, max_position_embeddings=20)
GROUPED = dict(**WIDE, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
TABLES = {"embed_tokens.weight": "embedding", "lm_head.weight": "output_head"}
MLP = {"gate_proj.weight": "matrix", "up_proj.weight": "matrix", "down_proj.weight": "matrix"}
ATTENTION = {
    "q_proj.weight": "queries: 32x48 split 4*8",
    "k_proj.weight": "keys: 16x48 split 8+8",
    "v_proj.weight": "values: 16x48 split 8+8",
    "o_proj.weight": "matrix",
}
EXPERTS = {
    "experts.gate_up_proj": "experts: gate and up: 6 matrices 56x48 split 28+28",
    "experts.down_proj": "experts: 6 matrices 48x28",
    "mlp.gate.weight": "router",
}


def causal(name: str, **sizes: Any) -> Callable[[Any], Any]:
    """Return what makes the causal language model of a family."""
    return lambda transformers: getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**sizes)
    )


def model_of(name: str, config: str, **sizes: Any) -> Callable[[Any], Any]:
    """Return what makes a model by the names of its class and of its config's."""
    return lambda transformers: getattr(transformers, name)(getattr(transformers, config)(**sizes))


FAMILIES = {
    "gpt2": Family(
        model_of("GPT2LMHeadModel", "GPT2Config", n_embd=48, n_head=6, n_layer=2, vocab_size=96, n_positions=20),
        {
            "wte.weight": "embedding",  # also the head
            "wpe.weight": "embedding",
            "c_attn.weight": "queries, keys and values: 144x48 transposed split 18*8",
            "attn.c_proj.weight": "matrix: 48x48 transposed",
            "c_fc.weight": "matrix: 192x48 transposed",
            "mlp.c_proj.weight": "matrix: 48x192 transposed",
        },
    ),
    "llama": Family(causal("Llama", **GROUPED), {**TABLES, **ATTENTION, **MLP}),
    "qwen2": Family(
        causal("Qwen2", **{**GROUPED, "head_dim": 12}, tie_word_embeddings=True),
        {
            **MLP,
            "embed_tokens.weight": "embedding",
            "q_proj.weight": "queries: 48x48 split 4*12",
            "k_proj.weight": "keys: 24x48 split 12+12",
            "v_proj.weight": "values: 24x48 split 12+12",
            "o_proj.weight": "matrix",
        },
    ),
    "qwen3": Family(
        causal("Qwen3", **{**GROUPED, "head_dim": 16}),
        {
            **TABLES,
            **MLP,
            "q_proj.weight": "queries: 64x48 split 4*16",
            "k_proj.weight": "keys: 32x48 split 16+16",
            "v_proj.weight": "values: 32x48 split 16+16",
            "o_proj.weight": "matrix",
        },
    ),
    "qwen3_moe": Family(
        causal("Qwen3Moe", **GROUPED, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=28),
        {**TABLES, **ATTENTION, **EXPERTS},
    ),
    "mixtral": Family(
        causal("Mixtral", **{**GROUPED, "intermediate_size": 28}, num_local_experts=6),
        {**TABLES, **ATTENTION, **EXPERTS},
    ),
    "llama4": Family(
        model_of(
            "Llama4ForCausalLM", "Llama4TextConfig", **GROUPED, intermediate_size_mlp=80, num_local_experts=6,
            moe_layers=[0, 1],
        ),
        {
            **TABLES,
            **ATTENTION,
            **MLP,  # of the shared expert
            "experts.gate_up_proj": "experts: gate and up: 6 matrices 160x48 transposed split 80+80",
            "experts.down_proj": "experts: 6 matrices 48x80 transposed",
            "router.weight": "router",
        },
    ),
    "gpt_oss": Family(
        causal("GptOss", **GROUPED, num_local_experts=6, num_experts_per_tok=2),
        {
            **TABLES,
            **ATTENTION,
            "experts.gate_up_proj": "experts: gate and up: 6 matrices 160x48 transposed",  # whose rows alternate
            "experts.gate_up_proj_bias": "bias",
            "experts.down_proj": "experts: 6 matrices 48x80 transposed",
            "experts.down_proj_bias": "bias",
            "router.weight": "router",
        },
    ),
    "deepseek_v3": Family(
        causal(
            "DeepseekV3", **WIDE, intermediate_size=80, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=36,
            kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=6, n_group=2,
            topk_group=1, num_experts_per_tok=2, moe_intermediate_size=28, first_k_dense_replace=1,
        ),
        {
            **TABLES,
            **MLP,  # also of the shared expert
            **EXPERTS,
            "q_a_proj.weight": "matrix",
            "q_b_proj.weight": "queries: 80x36 split 4*20",
            "kv_a_proj_with_mqa.weight": "latent and rotary key: 28x48 split 20+8",
            "kv_b_proj.weight": "latent keys and values: 112x20 split 4*(12+16)",
            "o_proj.weight": "matrix",
        },
    ),
    "gemma": Family(
        causal("Gemma", **{**GROUPED, "num_key_value_heads": 1}),
        {
            **MLP,
            "embed_tokens.weight": "embedding",  # also the head
            "q_proj.weight": "queries: 32x48 split 4*8",
            "k_proj.weight": "keys",  # one head
            "v_proj.weight": "values",
            "o_proj.weight": "matrix",
        },
    ),
    "bert": Family(
        model_of("BertForMaskedLM", "BertConfig", **WIDE, intermediate_size=80, num_attention_heads=6),
        {
            "word_embeddings.weight": "embedding",  # also the decoder of cls.predictions
            "position_embeddings.weight": "embedding",
            "token_type_embeddings.weight": "embedding",
            "query.weight": "queries: 48x48 split 6*8",
            "key.weight": "keys: 48x48 split 6*8",
            "value.weight": "values: 48x48 split 6*8",
            "attention.output.dense.weight": "matrix",
            "intermediate.dense.weight": "matrix",
            "0.output.dense.weight": "matrix",
            "1.output.dense.weight": "matrix",
            "transform.dense.weight": "matrix",
        },
    ),
    "t5": Family(
        model_of(
            "T5ForConditionalGeneration", "T5Config", d_model=48, d_kv=8, d_ff=80, num_layers=2, num_heads=4,
            vocab_size=96,
        ),
        {
            "shared.weight": "embedding",  # also the embeddings of both stacks, and the head
            "relative_attention_bias.weight": "embedding",
            "Attention.q.weight": "queries: 32x48 split 4*8",
            "Attention.k.weight": "keys: 32x48 split 4*8",
            "Attention.v.weight": "values: 32x48 split 4*8",
            "Attention.o.weight": "matrix",
            "DenseReluDense.wi.weight": "matrix",
            "DenseReluDense.wo.weight": "matrix",
        },
    ),
    "vit": Family(
        model_of(
            "ViTForImageClassification", "ViTConfig", hidden_size=48, intermediate_size=80, num_hidden_layers=2,
            num_attention_heads=6, image_size=8, patch_size=4, num_labels=10,
        ),
        {
            "position_embeddings": "embedding",
            "patch_embeddings.projection.weight": "embedding",
            "q_proj.weight": "queries: 48x48 split 6*8",
            "k_proj.weight": "keys: 48x48 split 6*8",
            "v_proj.weight": "values: 48x48 split 6*8",
            "o_proj.weight": "matrix",
            "fc1.weight": "matrix",
            "fc2.weight": "matrix",
            "classifier.weight": "output_head",
        },
    ),
}  # fmt: skip
