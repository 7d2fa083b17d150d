"""Formats of numbers that the operations share with what calls them."""

from __future__ import annotations

import torch

# Parameters of these dtypes may be rounded stochastically.
HALVES = (torch.float16, torch.bfloat16)

# Neighbours that share a scale in momentum of 8 bits: kBlock of the compiled operations.
BLOCK = 64
