"""Build compiled variants again, from the commits that they name, and compare the bytes.

    python -m tools.build.rebuild build
    python -m tools.build.rebuild build/torch-stable-abi211-cpu-x86_64-linux

Each variant's commit is checked out into a temporary clone of this repository and built there, by the commit's own
tools.build. Equal bytes show that a variant has what its commit says. Other bytes do not show that somebody changed it:
another compiler or torch makes other ones.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.build.commands import BuildError, run
from tools.build.machines import FOREIGN_TORCHES
from tools.build.source_tree import clone_at
from tools.build.variant_metadata import digest_of, read_metadata

ROOT = Path(__file__).resolve().parents[2]


def compiled_variants(folder: Path) -> list[Path]:
    """Return `folder` if it is a compiled variant, else those in it; `BuildError` if there are none."""
    variants = sorted({library.parent for pattern in ("*.so", "*/*.so") for library in folder.glob(pattern)})
    if not variants:
        raise BuildError(f"{folder} is no compiled variant (it has no library) and holds none")
    return variants


def rebuild(variant: Path, root: Path, work: Path) -> Path:
    """Build the commit of `variant` again in the empty folder `work`, from the repository `root`; return the result.

    Raises `BuildError` if no commit has the variant's files, if `root` lacks the commit, and if its build fails.
    """
    metadata = read_metadata(variant)
    kernel = metadata.provenance and metadata.provenance.kernel
    if kernel is None or kernel.dirty:
        why = "names no commit" if kernel is None else "was built with uncommitted changes: no commit has its files"
        raise BuildError(f"{variant.name} {why}")
    clone, output = work / "clone", work / "build"
    try:
        clone_at(root, str(kernel.commit), clone)
    except BuildError as error:
        raise BuildError(f"{variant.name}: {error}") from None
    torches = clone / FOREIGN_TORCHES.relative_to(ROOT)
    torches.parent.mkdir()
    torches.symlink_to(FOREIGN_TORCHES)
    backend, processor = str(metadata.backend.backend_type), variant.name.split("-")[-2]
    command = [sys.executable, "-m", "tools.build.variants", "--backend", backend, "--machine", processor]
    run([*command, "--output", output], cwd=clone)
    (rebuilt,) = compiled_variants(output)
    return rebuilt


def differences(variant: Path, rebuilt: Path) -> list[str]:
    """Return one line for each file that differs, or that only one of the two has, and for another folder's name."""
    digests, rebuilt_digests = contents(variant), contents(rebuilt)
    lines = [] if variant.name == rebuilt.name else [f"this machine builds {rebuilt.name} instead"]
    for file in sorted(digests.keys() | rebuilt_digests.keys()):
        if file not in rebuilt_digests:
            lines.append(f"{file} is not built")
        elif file not in digests:
            lines.append(f"{file} is missing")
        elif digests[file] != rebuilt_digests[file]:
            lines.append(f"{file} has other bytes")
    return lines


def contents(variant: Path) -> dict[str, str]:
    """Return a digest of each file of a variant, its metadata included."""
    metadata = hashlib.sha256((variant / "metadata.json").read_bytes()).hexdigest()
    return {**digest_of(variant).files, "metadata.json": metadata}


def report(variant: Path, root: Path) -> int:
    """Print whether `variant` is what its commit builds; return 0 or 1."""
    with tempfile.TemporaryDirectory(prefix="rebuild-") as work:
        try:
            lines = differences(variant, rebuild(variant, root, Path(work)))
        except BuildError as error:
            print(error)
            return 1
    commit = read_metadata(variant).provenance.kernel.commit
    print(f"{variant.name}: {'other bytes than' if lines else 'the same bytes as'} from commit {commit}")
    for line in lines:
        print(f"  {line}")
    return 1 if lines else 0


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Build variants again from their commits, and compare the bytes.")
    parser.add_argument("folder", type=Path, help="a compiled variant, or a folder of variants")
    folder = parser.parse_args(arguments).folder.resolve()
    try:
        variants = compiled_variants(folder)
    except BuildError as error:
        print(f"tools.build.rebuild: {error}", file=sys.stderr)
        return 1
    return max([report(variant, root) for variant in variants])


if __name__ == "__main__":
    sys.exit(main())
