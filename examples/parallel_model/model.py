"""A small pre-norm transformer whose layers have, in turn, a dense MLP and a mixture of experts.

It can be cut into stages: a part that lies elsewhere is None, and what is left keeps its full name. Every expert works
on every token, and the weight of those that the router has not chosen is zero; how tokens travel to their experts is
no matter of the optimizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

CONTEXT = 32
WIDTH = 32
HEAD = 8
HIDDEN = 48
EXPERTS = 4
CHOSEN = 2  # experts of a token
LAYERS = 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # However many heads are here: tensor parallelism splits them.
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """The weights of all experts as two stacks, (EXPERTS, rows, cols)."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the sum over the experts that are here, (batch, length, WIDTH), for weights (batch, length, here)."""
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        hidden = F.gelu(torch.einsum("blw,ehw->bleh", x, up)) * weights.unsqueeze(-1)
        return torch.einsum("bleh,ewh->blw", hidden, down)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        chosen = logits.topk(CHOSEN, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, chosen.indices, chosen.values.softmax(-1))
        return self.experts(x, weights)


class Block(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.attn_norm = nn.RMSNorm(WIDTH)
        self.attn = Attention()
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.mlp = Mixture() if sparse else MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self, symbols: int):
        super().__init__()
        self.tok_embeddings = nn.Embedding(symbols, WIDTH)
        self.pos_embeddings = nn.Embedding(CONTEXT, WIDTH)
        # By name and not by place, so that a layer keeps its name where others are missing.
        self.layers = nn.ModuleDict({str(i): Block(sparse=i % 2 == 1) for i in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, symbols, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each next symbol, (batch, length, symbols), for symbols (batch, length <= CONTEXT).

        A stage takes what the one before has returned, (batch, length, WIDTH), and returns the same if it has no head.
        """
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x) + self.pos_embeddings.weight[: x.size(1)]
        for layer in self.layers.values():
            x = layer(x)
        return x if self.lm_head is None else self.lm_head(self.norm(x))

    def keep_stage_(self, stage: int, stages: int) -> None:
        """Keep one of `stages` parts: its share of the layers, with the first the tables, with the last the head."""
        here = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        for name in [name for name in self.layers if int(name) not in here]:
            del self.layers[name]
        if stage > 0:
            self.tok_embeddings = self.pos_embeddings = None
        if stage < stages - 1:
            self.norm = self.lm_head = None


def whole_model(symbols: int, seed: int = 0) -> Transformer:
    """Return the model with the first weights of this seed, which are the same in every process."""
    torch.manual_seed(seed)
    return Transformer(symbols)


def loss_of(logits: Tensor, symbols: Tensor) -> Tensor:
    """Return the mean negative log-likelihood in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), symbols.flatten())
