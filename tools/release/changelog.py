"""Reads CHANGELOG.md, whose form is that of https://keepachangelog.com: a section a release, the newest first."""

from __future__ import annotations

import re

UNRELEASED = "Unreleased"


def sections(text: str) -> dict[str, dict[str, str]]:
    """Return the text of each part, such as `Added`, of each release; releases by what is in the brackets.

    Text before the first part is that of a part without a name.
    """
    releases: dict[str, dict[str, str]] = {}
    for block in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = block.partition("\n")
        release = re.match(r"\[([^]]+)\]", heading)
        if release is None:
            raise ValueError(f"a section of CHANGELOG.md must begin with `## [release]`, got `## {heading}`")
        before, *parts = re.split(r"^### ", body, flags=re.MULTILINE)
        releases[release[1]] = {"": before} if before.strip() else {}
        releases[release[1]] |= {part.partition("\n")[0].strip(): part.partition("\n")[2] for part in parts}
    return releases


def named(text: str) -> set[str]:
    """Return everything that a text has in backticks."""
    return set(re.findall(r"`([^`]+)`", text))
