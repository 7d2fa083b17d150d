"""A small language model with norms of all kinds, a frozen layer and, if asked for, tied weights."""

import torch
from torch import nn
from torch.nn import Parameter

from tests.support.model_of_many_kinds import Attention


class Scale(nn.Module):
    """A norm that is no nn.LayerNorm: the Trainer knows it by name or not at all."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(torch.ones(8))

    def forward(self, x):
        return self.weight * x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.LayerNorm = Scale()
        self.q_norm = Scale()
        self.normalizer = Scale()
        self.ln_1 = nn.LayerNorm(8)

    def forward(self, x):
        return self.q_proj(self.normalizer(self.q_norm(self.LayerNorm(self.ln_1(x)))))


class Network(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = Scale()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.lm_head = nn.Linear(8, 16, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids, labels=None):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.lm_head(self.frozen(self.norm(x)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Fused(nn.Module):
    """Modules tell what its names do not."""

    def __init__(self):
        super().__init__()
        self.words, self.attn, self.final_norm = nn.Embedding(40, 24), Attention(), nn.LayerNorm(24)
        self.to_words = nn.Linear(24, 40, bias=False)

    def get_output_embeddings(self):
        return self.to_words
