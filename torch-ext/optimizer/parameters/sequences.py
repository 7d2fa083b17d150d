"""Sequences in the forms that users and configuration libraries pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence but not a string: a list, a tuple, or OmegaConf's ListConfig."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
