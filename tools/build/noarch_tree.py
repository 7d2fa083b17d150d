"""Write a second source tree, from which the Hub's builder makes the noarch variants.

    python -m tools.build.noarch_tree --output DIR

One build.toml is either for compiled variants ([torch]) or for noarch ones ([torch-noarch]), so it takes two trees with
the same name, version and repository to have both. The second holds the package without its compiled sources, and the
files of the first that the builder reads beside it: tests, benchmarks, card and flake. Commit it to a repository or a
branch of its own and build it there: its commit names the operators. `kernel-builder upload` from it adds its variants
to the branch of the Hub that the first tree's upload made, and leaves the others there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from kernels._rust import Build

from tools.build.commands import BuildError
from tools.build.noarch import NOARCH_BACKENDS, noarch_recipe
from tools.build.recipe import Recipe, read_build

ROOT = Path(__file__).resolve().parents[2]
# What the builder reads of a tree beside build.toml and the package; the lock pins the builder itself.
BESIDE = ("CARD.md", "LICENSE", "flake.nix", "flake.lock", "tests/**/*", "benchmarks/benchmark*.py")


def write_tree(root: Path, output: Path) -> None:
    """Write the tree for the repository `root` into the new or empty folder `output`.

    Raises `BuildError` if `output` holds anything, if build.toml or the package does not allow it, or if the Hub's
    parser refuses what was written.
    """
    tables = read_build(root)
    recipe = noarch_recipe(root, tables, NOARCH_BACKENDS[0])
    if output.exists() and any(output.iterdir()):
        raise BuildError(f"{output} has to be empty, so that the tree holds nothing else")
    for file in tree_files(root, recipe):
        (output / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, output / file)
    (output / "build.toml").write_text(build_toml(tables))
    try:
        Build.open(output)
    except ValueError as error:
        raise BuildError(f"{output / 'build.toml'}: {' '.join(str(error).split())}") from None


def tree_files(root: Path, recipe: Recipe) -> Iterator[Path]:
    """Yield the files that are the same in both trees, relative to `root`."""
    for file in recipe.package_files:
        yield recipe.package / file
    for pattern in BESIDE:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(root)


def build_toml(tables: dict) -> str:
    """Return the text of the second tree's build.toml: the first one's [general], with the noarch backends."""
    general = {**tables["general"], "backends": list(NOARCH_BACKENDS)}
    hub = general.pop("hub")
    package = {key: value for key, value in tables["torch"].items() if key == "pyext"}
    sections = {"general": general, "general.hub": hub, "torch-noarch": package}
    return "\n".join(section(title, values) for title, values in sections.items())


def section(title: str, values: dict) -> str:
    """Return a table of TOML. Strings, numbers and lists of them are written as in JSON."""
    return "".join(f"{line}\n" for line in [f"[{title}]", *(f"{key} = {json.dumps(values[key])}" for key in values)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the source tree of the noarch variants for the Hub's builder.")
    parser.add_argument("--output", type=Path, required=True, help="a new or empty folder")
    output = parser.parse_args().output
    try:
        write_tree(ROOT, output)
    except (BuildError, OSError) as error:
        print(f"tools.build.noarch_tree: {error}", file=sys.stderr)
        return 1
    print(f"written: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
