"""The matrices of three published models, by which plans for many GPUs are judged."""

from __future__ import annotations

import math
from typing import NamedTuple


class Weights(NamedTuple):
    """Parameters of one shape, `count` of them in a model; experts are (E, rows, cols)."""

    name: str
    shape: tuple[int, ...]
    count: int
    used: float = 1.0  # share of them that is used for a token

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return math.prod(self.shape) * self.count


# 32 and 80 layers with grouped queries: Grattafiori et al., The Llama 3 Herd of Models (2024), table 3.
LLAMA_8B = [
    Weights("attention.wq", (4096, 4096), 32),
    Weights("attention.wk", (1024, 4096), 32),
    Weights("attention.wv", (1024, 4096), 32),
    Weights("attention.wo", (4096, 4096), 32),
    Weights("mlp.gate", (14336, 4096), 32),
    Weights("mlp.up", (14336, 4096), 32),
    Weights("mlp.down", (4096, 14336), 32),
]
LLAMA_70B = [
    Weights("attention.wq", (8192, 8192), 80),
    Weights("attention.wk", (1024, 8192), 80),
    Weights("attention.wv", (1024, 8192), 80),
    Weights("attention.wo", (8192, 8192), 80),
    Weights("mlp.gate", (28672, 8192), 80),
    Weights("mlp.up", (28672, 8192), 80),
    Weights("mlp.down", (8192, 28672), 80),
]
# The shapes of Kimi K2, 1 T parameters: Kimi Team, Kimi K2: Open Agentic Intelligence (2025), and its published config.
MOE_1T = [
    Weights("attention.q_a", (1536, 7168), 61),
    Weights("attention.q_b", (12288, 1536), 61),
    Weights("attention.kv_a", (576, 7168), 61),
    Weights("attention.kv_b", (16384, 512), 61),
    Weights("attention.o", (7168, 8192), 61),
    Weights("dense.gate", (18432, 7168), 1),
    Weights("dense.up", (18432, 7168), 1),
    Weights("dense.down", (7168, 18432), 1),
    Weights("shared.gate", (2048, 7168), 60),
    Weights("shared.up", (2048, 7168), 60),
    Weights("shared.down", (7168, 2048), 60),
    Weights("experts.gate", (384, 2048, 7168), 60, used=8 / 384),
    Weights("experts.up", (384, 2048, 7168), 60, used=8 / 384),
    Weights("experts.down", (384, 7168, 2048), 60, used=8 / 384),
]
MODELS = {"Llama 8B": LLAMA_8B, "Llama 70B": LLAMA_70B, "MoE 1T": MOE_1T}
# The numbers of GPUs for which each model is planned.
GPUS = {
    "Llama 8B": (8, 16, 32, 64, 128, 256),
    "Llama 70B": (64, 128, 256, 512, 1024, 2048, 4096),
    "MoE 1T": (256, 512, 1024, 2048, 4096),
}
