"""Attributes of models and their configs, some of which are properties that raise what they like."""

from __future__ import annotations

from typing import Any, Mapping


def attribute(source: Any, key: str) -> Any:
    """Return an attribute of `source`, or an item if it is a mapping; None if there is none or if reading it raises."""
    try:
        value = source.get(key) if isinstance(source, Mapping) else None
        return getattr(source, key, None) if value is None else value
    except Exception:  # such as those of transformers' configs for sizes that differ between layers
        return None
