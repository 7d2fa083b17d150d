"""A small pre-norm transformer that predicts the next character.

Its layers have the names that large models give them and torch's own initial weights: nothing in it is chosen for
either optimizer.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT = 64
WIDTH = 128
HEAD = 32  # width of an attention head
LAYERS = 2


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attn_norm = nn.RMSNorm(width)
        self.attn = Attention(width)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class CharacterModel(nn.Module):
    """Its `width` is a multiple of HEAD."""

    def __init__(self, symbols: int, width: int = WIDTH):
        super().__init__()
        self.tok_embeddings = nn.Embedding(symbols, width)
        self.pos_embeddings = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, symbols, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """Return the logits of each next symbol, (batch, length, symbols), for (batch, length <= CONTEXT)."""
        x = self.tok_embeddings(symbols) + self.pos_embeddings.weight[: symbols.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def loss_of(model: CharacterModel, windows: Tensor) -> Tensor:
    """Return the mean negative log-likelihood in nats per character of windows (batch, CONTEXT + 1)."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
