"""The file of pins that a publisher gives to users, and that they keep in a repository of theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# What requests to the Hub say of a kernel's repository.
KERNEL = {"repo_type": "kernel"}


@dataclass(frozen=True)
class Pins:
    """What a file of pins says: the pins of one revision's variants, by their names."""

    repo_id: str
    revision: str
    variants: Mapping[str, str]


def read_pins(file: Path, repo_id: str) -> Pins:
    """Return what a file says about `repo_id`; ValueError for a file of something else, OSError if it is not there."""
    try:
        content = json.loads(file.read_text())
        pins = Pins(content["repo-id"], content["revision"], dict(content["variants"]))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file} is no file of pins: {type(error).__name__}: {error}") from None
    if pins.repo_id != repo_id:
        raise ValueError(f"{file} is for {pins.repo_id}, not for {repo_id}")
    return pins


def write_pins(file: Path, pins: Pins) -> None:
    """Write the pins of a revision's variants: {"repo-id": ..., "revision": ..., "variants": {name: pin}}."""
    content = {"repo-id": pins.repo_id, "revision": pins.revision, "variants": dict(sorted(pins.variants.items()))}
    file.write_text(json.dumps(content, indent=2) + "\n")
