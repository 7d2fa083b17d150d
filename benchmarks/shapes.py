"""Parameters of named models as data, and the matrices among them.

Weights of linear layers are (out, in). A convolution (out, in, height, width) is the matrix (out, in * height * width).
Embeddings, output heads, routers and vectors do not count as matrices here: AdamW updates them, as in every Muon
recipe.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple


class Parameter(NamedTuple):
    """One parameter of a model; a `matrix` is orthogonalized."""

    name: str
    shape: tuple[int, ...]
    matrix: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        """The sides of the matrix; convolutions are flattened."""
        return self.shape[0], math.prod(self.shape[1:])


def _norm(name: str, size: int) -> list[Parameter]:
    return [Parameter(f"{name}.weight", (size,)), Parameter(f"{name}.bias", (size,))]


def _linear(name: str, out: int, into: int, matrix: bool = True) -> list[Parameter]:
    return [Parameter(f"{name}.weight", (out, into), matrix), Parameter(f"{name}.bias", (out,))]


def _block(names: list[str], hidden: int) -> list[Parameter]:
    """A transformer's block, the same in GPT-2 and ViT; names are in the order of a forward pass."""
    norm, attention, projection, norm_2, up, down = names
    return [
        *_norm(norm, hidden),
        *_linear(attention, 3 * hidden, hidden),
        *_linear(projection, hidden, hidden),
        *_norm(norm_2, hidden),
        *_linear(up, 4 * hidden, hidden),
        *_linear(down, hidden, 4 * hidden),
    ]


def gpt2(layers: int = 12, hidden: int = 768, vocabulary: int = 50257, context: int = 1024) -> list[Parameter]:
    """Return GPT-2's parameters, by default those of the 124M model; Radford et al. (2019)."""
    model = [Parameter("wte.weight", (vocabulary, hidden)), Parameter("wpe.weight", (context, hidden))]
    for i in range(layers):
        parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        model += _block([f"h.{i}.{part}" for part in parts], hidden)
    return model + _norm("ln_f", hidden)


class Llama(NamedTuple):
    """Sizes of a Llama 3 model; `keys` is the width of keys and of values."""

    layers: int
    hidden: int
    keys: int
    intermediate: int
    tied: bool
    vocabulary: int = 128256


def llama(sizes: Llama) -> list[Parameter]:
    """Return a Llama's parameters; Grattafiori et al., The Llama 3 Herd of Models, arXiv:2407.21783, table 3."""
    hidden, keys, inner = sizes.hidden, sizes.keys, sizes.intermediate
    model = [Parameter("embed_tokens.weight", (sizes.vocabulary, hidden))]
    for i in range(sizes.layers):
        weights = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        model += [Parameter(f"layers.{i}.{name}.weight", shape, True) for name, shape in weights.items()]
        norms = ("input_layernorm", "post_attention_layernorm")
        model += [Parameter(f"layers.{i}.{name}.weight", (hidden,)) for name in norms]
    model.append(Parameter("norm.weight", (hidden,)))
    return model if sizes.tied else [*model, Parameter("lm_head.weight", (sizes.vocabulary, hidden))]


def mixture(layers: int = 4, hidden: int = 1280, experts: int = 64, inner: int = 512) -> list[Parameter]:
    """Return a mixture of small experts, by default 64 with matrices 1280 x 512, each in a separate parameter."""
    model = [Parameter("embed_tokens.weight", (32000, hidden))]
    for i in range(layers):
        attention = [f"layers.{i}.self_attn.{part}_proj.weight" for part in "qkvo"]
        model += [Parameter(name, (hidden, hidden), True) for name in attention]
        model.append(Parameter(f"layers.{i}.mlp.router.weight", (experts, hidden)))
        for expert in range(experts):
            name = f"layers.{i}.mlp.experts.{expert}"
            model += [Parameter(f"{name}.{part}_proj.weight", (inner, hidden), True) for part in ("gate", "up")]
            model.append(Parameter(f"{name}.down_proj.weight", (hidden, inner), True))
        model += [Parameter(f"layers.{i}.norm{k}.weight", (hidden,)) for k in (1, 2)]
    return [*model, Parameter("norm.weight", (hidden,)), Parameter("lm_head.weight", (32000, hidden))]


def vit(layers: int = 12, hidden: int = 384, patches: int = 196, classes: int = 1000) -> list[Parameter]:
    """Return a vision transformer's parameters, by default ViT-S/16's; Touvron et al., arXiv:2012.12877 (DeiT-S)."""
    model = [Parameter("cls_token", (1, 1, hidden)), Parameter("pos_embed", (1, patches + 1, hidden))]
    model += [Parameter("patch_embed.proj.weight", (hidden, 3, 16, 16)), Parameter("patch_embed.proj.bias", (hidden,))]
    for i in range(layers):
        parts = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        model += _block([f"blocks.{i}.{part}" for part in parts], hidden)
    return model + _norm("norm", hidden) + _linear("head", classes, hidden, matrix=False)


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> list[Parameter]:
    """Return a bottleneck ResNet's parameters, by default ResNet-50's; He et al., arXiv:1512.03385, table 1."""
    model = [Parameter("conv1.weight", (width, 3, 7, 7), True), *_norm("bn1", width)]
    into = width
    for stage, depth in enumerate(depths, 1):
        inner = width * 2 ** (stage - 1)
        for block in range(depth):
            name = f"layer{stage}.{block}"
            convolutions = {"1": (inner, into, 1, 1), "2": (inner, inner, 3, 3), "3": (4 * inner, inner, 1, 1)}
            for k, shape in convolutions.items():
                model += [Parameter(f"{name}.conv{k}.weight", shape, True), *_norm(f"{name}.bn{k}", shape[0])]
            if block == 0:
                model.append(Parameter(f"{name}.downsample.0.weight", (4 * inner, into, 1, 1), True))
                model += _norm(f"{name}.downsample.1", 4 * inner)
            into = 4 * inner
    return model + _linear("fc", classes, into, matrix=False)


MODELS = {
    "gpt2-124m": gpt2(),
    "vit-s": vit(),
    "resnet-50": resnet(),
    "moe-64": mixture(),
    "llama-1b": llama(Llama(16, 2048, 512, 8192, tied=True)),
    "llama-8b": llama(Llama(32, 4096, 1024, 14336, tied=False)),
    "llama-70b": llama(Llama(80, 8192, 1024, 28672, tied=False)),
}
SQUARES = [(side, side) for side in (128, 256, 512, 1024, 2048, 4096, 8192)]
TINY_MODEL = [*gpt2(layers=1, hidden=32, vocabulary=48, context=8), Parameter("conv.weight", (16, 8, 3, 3), True)]


def matrix_counts(parameters: list[Parameter]) -> Counter[tuple[int, int]]:
    """Return how many matrices of each (rows, columns) there are, in the order of their first occurrence."""
    return Counter(p.rows_and_columns for p in parameters if p.matrix)
