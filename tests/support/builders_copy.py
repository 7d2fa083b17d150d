"""What the Hub's builder sees of this repository (huggingface/kernels at 8ac69fc, nix-builder/lib/source-set.nix).

It copies build.toml, the sources that build.toml lists, and of torch-ext/ and tests/ the files with the extensions of
`pyext`: no tools/, no benchmarks/, no pytest.ini. Among them it writes a pyproject.toml, whose settings pytest takes.
"""

from __future__ import annotations

import re
import shutil
from importlib.metadata import Distribution, distribution
from pathlib import Path

import tomllib
from packaging.requirements import Requirement

from tests.support.toy_kernel import git

# All that kernel-builder/src/pyproject/templates/torch/pyproject.toml tells pytest.
PYPROJECT = '[tool.pytest.ini_options]\nmarkers = ["kernels_ci: mark a test as a kernel CI test"]\n'


def copy_as_builder(repository: Path, folder: Path) -> Path:
    """Copy what the builder would copy into the new `folder`, and return that."""
    for file in files_of_builder(repository):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(repository / file, folder / file)
    return folder


def files_of_builder(repository: Path) -> list[str]:
    """Return the files that the builder copies; of a git repository it sees the tracked ones."""
    tables = tomllib.loads((repository / "build.toml").read_text())
    listed = [source for table in (tables["torch"], *tables["kernel"].values()) for source in table["src"]]
    tracked = git(repository, "ls-files", "-z", "torch-ext", "tests").split("\0")
    extensions = tuple(f".{extension}" for extension in tables["torch"]["pyext"])
    return list(dict.fromkeys(["build.toml", *listed, *(file for file in tracked if file.endswith(extensions))]))


def link_packages(repository: Path, folder: Path) -> Path:
    """Link into the new `folder` what the builder's Python has besides its own library, and return that."""
    folder.mkdir()
    for package in closure(["torch", "pytest", *packages_of_flake(repository)]).values():
        names = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        for name in names:
            link = folder / name
            if not link.exists():
                link.symlink_to(package.locate_file(name))
    return folder


def packages_of_flake(repository: Path) -> list[str]:
    """Return the packages that flake.nix asks for to run the tests."""
    return re.search(r"pythonCheckInputs =.*?\[(.*?)\]", (repository / "flake.nix").read_text(), re.S)[1].split()


def closure(names: list[str]) -> dict[str, Distribution]:
    """Return these distributions and all that they need, by name."""
    distributions: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in distributions:
            distributions[name] = distribution(name)
            needed = map(Requirement, distributions[name].requires or ())
            waiting += [need.name for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})]
    return distributions
