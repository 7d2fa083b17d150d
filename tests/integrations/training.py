"""A tiny language model: a table, hidden matrices and a head; the text it reads; and the plain loop to compare with.

The text is a docstring of the standard library, a character a token.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

VOCABULARY = 128  # ASCII
LENGTH = 16  # tokens in a sequence
SIZE = 8  # sequences in a batch
# The branch of each parameter of the model.
BRANCHES = {
    "embed_tokens.weight": "adamw",
    "up_proj.weight": "muon",
    "down_proj.weight": "muon",
    "norm.weight": "adamw",
    "norm.bias": "adamw",
    "lm_head.weight": "adamw",
}


class LanguageModel(nn.Module):
    """Predicts the next token from each token alone; `forward` returns a loss where it is given labels."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(VOCABULARY, 32)
        self.up_proj = nn.Linear(32, 48, bias=False)
        self.down_proj = nn.Linear(48, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embed_tokens(input_ids)
        hidden = hidden + self.down_proj(self.up_proj(hidden).relu())
        logits = self.lm_head(self.norm(hidden))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def text() -> Tensor:
    """Return the tokens of a docstring."""
    return torch.tensor([min(code, VOCABULARY - 1) for code in (json.__doc__ * 2).encode()])


def batches(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return batches of the text from random places, each with the tokens that follow as labels."""
    tokens, generator = text(), torch.Generator().manual_seed(seed)
    inputs = []
    for _ in range(count):
        starts = torch.randint(len(tokens) - LENGTH - 1, (SIZE, 1), generator=generator)
        places = starts + torch.arange(LENGTH)
        inputs.append({"input_ids": tokens[places], "labels": tokens[places + 1]})
    return inputs


def train(model: nn.Module, opt: torch.optim.Optimizer, data: list[dict[str, Tensor]]) -> list[float]:
    """Take a step for each batch, and return the losses before the steps."""
    losses = []
    for batch in data:
        loss = model(**batch)["loss"]
        losses.append(loss.item())
        opt.zero_grad()
        loss.backward()
        opt.step()
    return losses


def branches(opt) -> dict[str, str]:
    """Return the branch of each parameter of a Muon by its name."""
    return {row.name: row.branch for row in opt.explain().rows}


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors as they are now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
