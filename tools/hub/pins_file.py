"""The file of pins that a publisher gives to users, and that they keep in a repository of theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write_pins(file: Path, repo_id: str, revision: str, pins: Mapping[str, str]) -> None:
    """Write the pins of a commit's variants: {"repo-id": ..., "revision": ..., "variants": {name: pin}}."""
    content = {"repo-id": repo_id, "revision": revision, "variants": dict(sorted(pins.items()))}
    file.write_text(json.dumps(content, indent=2) + "\n")


def read_pins(file: Path, repo_id: str) -> dict[str, str]:
    """Return the pin of each variant in a file of `repo_id`; ValueError for a file of something else."""
    try:
        content = json.loads(file.read_text())
        if content["repo-id"] != repo_id:
            raise ValueError(f"the pins are of {content['repo-id']}, not of {repo_id}")
        return dict(content["variants"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file} is no file of pins for {repo_id}: {error}") from None
