"""Several variants of the kernel side by side, each called by the commit that it was built from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.built_kernel import find_variant, read_metadata

BUILD = Path(__file__).resolve().parent.parent / "build"


def chosen_variants(paths: Sequence[Path] | None) -> dict[str, Path]:
    """Return the folders of variants by label: those that `paths` name, None for the one in `build/`.

    A path is a variant's folder, or one that holds variants, of which the one for this torch is taken. A label is the
    commit, with a plus where files had changed, and numbered where an earlier variant is called the same.
    FileNotFoundError where there is no variant.
    """
    found: dict[str, Path] = {}
    for path in paths or [BUILD]:
        folder = (path if (path / "metadata.json").exists() else find_variant(path)).resolve()
        name = label = commit_of(folder)
        number = 1
        while label in found:
            number += 1
            label = f"{name} ({number})"
        found[label] = folder
    return found


def commit_of(folder: Path) -> str:
    """Return the short commit that a variant was built from, with a plus where files had changed."""
    built = read_metadata(folder)["provenance"]["kernel"]
    return built["commit"][:12] + ("+" if built["dirty"] else "")
