"""Make a second source tree, from which the Hub's builder makes the noarch variants.

    python -m tools.build.noarch_tree --output DIR

One build.toml is either for compiled variants ([torch]) or for noarch ones ([torch-noarch]), so it takes two trees with
the same name, version and repository to have both. The second holds the package without its compiled sources, and the
files of the first that the builder reads beside it: tests, benchmarks, card and flake.

DIR becomes a clone whose branch `noarch` has that tree as one commit more than this repository's. The builder writes
the commit into the variants. It is the same wherever this version of the program makes it. So whoever has the commit
below it can tell that those variants are of the same sources: `tools.hub.publish` does, and takes them into one
release.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kernels._rust import Build

from tools.build.commands import BuildError, git
from tools.build.noarch import NOARCH_BACKENDS, noarch_recipe
from tools.build.recipe import Recipe, read_build
from tools.build.source_tree import AS_IT_IS, clone_at, read_revision

ROOT = Path(__file__).resolve().parents[2]
BRANCH = "noarch"
MESSAGE = "The tree of the noarch variants"
# What the builder reads of a tree beside build.toml and the package; the lock pins the builder itself.
BESIDE = ("CARD.md", "LICENSE", "flake.nix", "flake.lock", "tests/**/*", "benchmarks/benchmark*.py")


def write_commit(root: Path, commit: str, output: Path) -> str:
    """Make the new or empty folder `output` a clone of `root` with the tree of `commit` on top of it.

    Return the new commit, which depends on `commit` and on this program alone: its parent is that one, and its author
    and time are that one's. Raises `BuildError` if `output` holds anything, if `root` lacks the commit, and as
    `write_tree` does.
    """
    with tempfile.TemporaryDirectory(prefix="noarch-") as work:
        source, tree = Path(work, "source"), Path(work, "tree")
        clone_at(root, commit, source)
        write_tree(source, tree)
        git(root, "clone", "--quiet", "--no-checkout", root, output)
        git(output, *AS_IT_IS, "--work-tree", tree, "add", "--all", "--force", ".")
    (written,) = git(output, "write-tree").split()
    about = git(output, "cat-file", "commit", commit).splitlines()
    by = next(line.removeprefix("committer ") for line in about if line.startswith("committer "))
    text = f"tree {written}\nparent {commit}\nauthor {by}\ncommitter {by}\n\n{MESSAGE}\n"
    (made,) = git(output, "hash-object", "-t", "commit", "-w", "--stdin", stdin=text).split()
    git(output, *AS_IT_IS, "checkout", "--quiet", "--force", "-B", BRANCH, made)
    return made


def commit_made_of(root: Path, commit: str) -> str:
    """Return the commit that `write_commit` makes of `commit`, whose files `root` has; `BuildError` as there."""
    with tempfile.TemporaryDirectory(prefix="noarch-") as work:
        return write_commit(root, commit, Path(work, "clone"))


def write_tree(root: Path, output: Path) -> None:
    """Write the tree for the files in `root` into the new or empty folder `output`.

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
    parser = argparse.ArgumentParser(description="Make the source tree of the noarch variants for the Hub's builder.")
    parser.add_argument("--output", type=Path, required=True, help="a new or empty folder")
    output = parser.parse_args().output.resolve()
    try:
        revision = read_revision(ROOT, ())
        if revision.dirty:
            raise BuildError("there are uncommitted changes, which the tree would lack: commit them first")
        made = write_commit(ROOT, revision.commit, output)
    except (BuildError, OSError) as error:
        print(f"tools.build.noarch_tree: {error}", file=sys.stderr)
        return 1
    print(f"{output}: branch {BRANCH}, commit {made}, made of {revision.commit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
