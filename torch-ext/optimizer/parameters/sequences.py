"""Sequences, as users and their configurations have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence and no string: a list, a tuple, or OmegaConf's ListConfig, which is neither."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
