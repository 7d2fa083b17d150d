"""Checksums of what ranks have: weighted by `counterweight`, their sum over the ranks is 0 if all have the same."""

from __future__ import annotations

import hashlib
from typing import Any, Sequence

import torch
from torch import Tensor

from ...plan.terms import RankSets


def code_of_sets(entries: Sequence[RankSets], contents: Sequence[Any]) -> int:
    """Return a number whose sum over the ranks is 0 if, for each of `entries`, each set of ranks has one content.

    `contents` are this rank's values for each entry; their texts are compared.
    """
    pairs = enumerate(zip(entries, contents))
    return sum(entry.weight * code_of(f"{i} {entry.set_index} {content!r}") for i, (entry, content) in pairs)


def code_of(text: str) -> int:
    """Return a 40-bit checksum of a text; sums of thousands of them stay far below 2**63."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big")


def codes_of_scales(scales: Tensor) -> Tensor:
    """Return a checksum of 40 bits for each scale, of float32 and positive, computed on its device.

    Scales are powers of two, whose bits are evenly spaced: the weighted sum of the bits alone is 0 if as many ranks
    double the scale as halve it.
    """
    codes = scales.view(torch.int32).to(torch.int64)
    for factor in (0x2C1B3C6D, 0x297A2D39):  # odd and below 2**30, so that no product exceeds 2**61
        codes = (codes & 0x7FFFFFFF) * factor
        codes = codes ^ (codes >> 27)
    return codes & 0xFFFFFFFFFF
