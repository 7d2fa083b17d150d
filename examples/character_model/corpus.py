"""Text that is on every machine with Python: the source of its standard library, as symbols to predict."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BYTES = 3_000_000
BLOCK = 4096  # bytes; a few functions, so that neighbouring blocks are different text of the same kind
HOLD_OUT_EVERY = 20
# Not part of the library proper, and present on some installations only.
SKIPPED = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Rows of consecutive symbols; every `HOLD_OUT_EVERY`-th row is for validation, the others for training.

    Interleaving gives both parts the same distribution, which the tail of an alphabetical list of files would not
    have. Windows lie inside a row, so that no window mixes text of two rows.
    """

    train: Tensor  # (rows, BLOCK), uint8
    validation: Tensor
    symbols: int
    sha256: str

    def batch(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        """Return `size` random windows of the training rows, (size, length) int64."""
        rows = torch.randint(len(self.train), (size, 1), generator=generator)
        starts = torch.randint(BLOCK - length + 1, (size, 1), generator=generator)
        return self.train[rows, starts + torch.arange(length)].long()

    def validation_windows(self, count: int, length: int) -> Tensor:
        """Return `count` windows (count, length) int64, evenly spread over all validation rows; always the same."""
        windows = self.validation.unfold(1, length, length).reshape(-1, length)
        chosen = torch.linspace(0, len(windows) - 1, min(count, len(windows))).long()
        return windows[chosen].long()


def standard_library() -> bytes:
    """Return the first `BYTES` bytes of the running interpreter's own library, files in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= BYTES:
            break
    return bytes(text[:BYTES])


def read_corpus(text: bytes) -> Corpus:
    """Return `text` as symbols: one for each ASCII byte that occurs, and one for all other bytes together."""
    if len(text) < HOLD_OUT_EVERY * BLOCK:
        raise ValueError(f"need at least {HOLD_OUT_EVERY * BLOCK} bytes of text, got {len(text)}")
    seen = sorted(byte for byte in set(text) if byte < 128)
    symbol_of = torch.full((256,), len(seen), dtype=torch.uint8)
    symbol_of[seen] = torch.arange(len(seen), dtype=torch.uint8)
    count = len(text) // BLOCK * BLOCK
    rows = symbol_of[torch.frombuffer(bytearray(text[:count]), dtype=torch.uint8).long()].view(-1, BLOCK)
    held_out = torch.arange(len(rows)) % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
    return Corpus(rows[~held_out], rows[held_out], len(seen) + 1, hashlib.sha256(text).hexdigest())
