"""A plugin of pytest that hides all packages but torch, triton, those of requirements/gpu.txt, and what they ask for.

So tests are collected as on a machine with a GPU that reaches no registry.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

_REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements" / "gpu.txt"


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_requirements(names: list[str]) -> set[str]:
    """Return distributions and all that they ask for, as far as it is installed."""
    distributions, left = set(), [normalized(name) for name in names]
    while left:
        name = left.pop()
        if name in distributions:
            continue
        distributions.add(name)
        try:
            asked = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform
            continue
        left += [normalized(re.match(r"[\w.-]+", line)[0]) for line in asked if "extra ==" not in line]
    return distributions


_NAMED = re.findall(r"^([\w-]+)==", _REQUIREMENTS.read_text(), re.MULTILINE)
_HERE = with_requirements(["torch", "triton", *_NAMED])
HIDDEN = {
    module
    for module, distributions in metadata.packages_distributions().items()
    if not _HERE & {normalized(name) for name in distributions}
}


class BareFinder(PathFinder):
    """Finds what is not hidden."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[:] = [BareFinder if finder is PathFinder else finder for finder in sys.meta_path]
