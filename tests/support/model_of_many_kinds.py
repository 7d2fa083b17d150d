"""A model with a weight of each kind, under names that do not tell all of them, and what `groups_for` says of it."""

import torch
from torch import nn
from torch.nn import Parameter


class Attention(nn.Module):
    """As nanoGPT's: one fused weight, whose sizes the module tells."""

    def __init__(self, n_embd=24, n_head=3):
        super().__init__()
        self.n_embd, self.n_head = n_embd, n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)


class Experts(nn.Module):
    def __init__(self, transposed=False, concatenated=True):
        super().__init__()
        self.is_transposed, self.is_concatenated, self.num_experts = transposed, concatenated, 4
        self.gate_up_proj = Parameter(torch.zeros((4, 24, 32) if transposed else (4, 32, 24)))
        self.down_proj = Parameter(torch.zeros((4, 16, 24) if transposed else (4, 24, 16)))


class Conv1D(nn.Module):
    """As transformers': (in, out)."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = Parameter(torch.zeros(inputs, outputs))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(40, 24)
        self.attn = Attention()
        self.ffn = Experts()
        self.gate = nn.Linear(24, 4, bias=False)
        self.signal = nn.Conv1d(24, 24, 3)
        self.ln = nn.LayerNorm(24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.out = nn.Linear(24, 40, bias=False)
        self.out.weight = self.tok.weight


def chosen(groups):
    """What was chosen for each parameter, by name."""
    return {row.name: row.reason for row in groups.choices.rows}


# By hand.
NETWORK = {
    "tok.weight": "embedding",
    "attn.c_attn.weight": "queries, keys and values: 72x24 split 9*8",
    "attn.c_attn.bias": "vector",
    "attn.c_proj.weight": "matrix",
    "attn.c_proj.bias": "vector",
    "ffn.gate_up_proj": "experts: gate and up: 4 matrices 32x24 split 16+16",
    "ffn.down_proj": "experts: 4 matrices 24x16",
    "gate.weight": "router",
    "signal.weight": "convolution: flatten 24x72",
    "signal.bias": "vector",
    "ln.weight": "vector",
    "ln.bias": "vector",
}
