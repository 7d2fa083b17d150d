"""Several variants of the kernel side by side, each named after the commit that it was built from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.built_kernel import find_variant, read_metadata

BUILD = Path(__file__).resolve().parent.parent / "build"


def chosen_variants(paths: Sequence[Path] | None) -> dict[str, Path]:
    """Return the folders of variants by label: those in `paths`, or, for None, the one in `build/`.

    A path is a variant's folder, or a folder of variants, of which the one for this torch is taken. A label is the
    commit, with a plus if files had changed, and with a number if an earlier variant has the same label.
    Raises FileNotFoundError if there is no variant.
    """
    folders: dict[str, Path] = {}
    for path in paths or [BUILD]:
        folder = (path if (path / "metadata.json").exists() else find_variant(path)).resolve()
        name = label = commit_of(folder)
        number = 1
        while label in folders:
            number += 1
            label = f"{name} ({number})"
        folders[label] = folder
    return folders


def commit_of(folder: Path) -> str:
    """Return the short commit that a variant was built from, with a plus if files had changed."""
    built = read_metadata(folder)["provenance"]["kernel"]
    return built["commit"][:12] + ("+" if built["dirty"] else "")
