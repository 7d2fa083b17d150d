"""Compare the files of built variants with the digest in their metadata.json.

    python -m tools.build.verify build
    python -m tools.build.verify build/torch-stable-abi211-cpu-x86_64-linux

Loading a kernel does not check the digest. This program does, and so shows whether a download is what was built. The
digest shows damage and differences. It is not a signature: whoever can change a file can also change metadata.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kernels._rust import DigestValidationError, Metadata
from kernels.variants import get_variants_local

from tools.build.commands import BuildError
from tools.build.variant_metadata import digest_of, read_metadata


def find_variants(folder: Path) -> list[Path]:
    """Return `folder` if it is a variant, else the variants in it; `BuildError` if there are none."""
    if (folder / "metadata.json").exists():
        return [folder]
    found = sorted(folder / variant.variant_str for variant in get_variants_local(folder))
    if not found:
        raise BuildError(f"{folder} is no variant (it has no metadata.json) and holds none")
    return found


def deviations(variant: Path, metadata: Metadata) -> list[str]:
    """Return one line for each file that was changed, removed or added since `variant` was built."""
    if metadata.digest is None:
        return ["metadata.json has no digest, so nothing is known about the files"]
    try:
        metadata.digest.validate(digest_of(variant))
    except DigestValidationError as error:
        return sorted(map(str, error.violations))
    return []


def origin(metadata: Metadata) -> str:
    """Return which ops a variant has and which commit it was built from."""
    kernel = metadata.provenance and metadata.provenance.kernel
    if kernel is None:
        return f"{metadata.id}, from an unknown commit"
    return f"{metadata.id}, from commit {kernel.commit}{' with uncommitted changes' if kernel.dirty else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare built variants with their digests.")
    parser.add_argument("folder", type=Path, help="a variant, or a folder of variants")
    folder = parser.parse_args(arguments).folder
    try:
        variants = find_variants(folder)
    except BuildError as error:
        print(f"tools.build.verify: {error}", file=sys.stderr)
        return 1
    return max(report(variant) for variant in variants)


def report(variant: Path) -> int:
    """Print what `variant` is and whether it is intact; return 0 or 1."""
    try:
        metadata = read_metadata(variant)
    except BuildError as error:
        print(error)
        return 1
    found = deviations(variant, metadata)
    print(f"{variant.resolve().name}: {'changed' if found else 'intact'}; {origin(metadata)}")
    for deviation in found:
        print(f"  {deviation}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
