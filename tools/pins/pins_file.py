"""The file of pins that a publisher gives to users, and that they keep in a repository of theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2

# What requests to the Hub say of a kernel's repository.
KERNEL = {"repo_type": "kernel"}
# What requests raise: of the Hub, the network and this disk, and for a proxy or an address that the client cannot use.
CLIENT_ERRORS = (ValueError, OSError, ImportError, httpx2.HTTPError, httpx2.InvalidURL)


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
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is no file of pins: {type(error).__name__}: {error}") from None
    if pins.repo_id != repo_id:
        raise ValueError(f"{file} is for {pins.repo_id}, not for {repo_id}")
    return pins


def check_place(file: Path) -> None:
    """Raise ValueError if no file of pins can be written there, before there is anything to write."""
    if not file.parent.is_dir():
        raise ValueError(f"--pins {file} needs the folder {file.parent}, which is not there")
    if file.is_dir():
        raise ValueError(f"--pins {file} is a folder, and a file is needed")


def write_pins(file: Path, pins: Pins) -> None:
    """Write the pins of a revision's variants: {"repo-id": ..., "revision": ..., "variants": {name: pin}}."""
    content = {"repo-id": pins.repo_id, "revision": pins.revision, "variants": dict(sorted(pins.variants.items()))}
    file.write_text(json.dumps(content, indent=2) + "\n")
