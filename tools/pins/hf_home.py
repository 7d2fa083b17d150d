"""A HF_HOME with pinned variants: where the clients look for them, what may be there before, and an archive of it."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tools.pins.pins_file import Pins
from tools.pins.verify import METADATA, VerificationError, faults

ARCHIVES = (".tar.gz", ".tgz")


class PrefetchError(Exception):
    """A reason, in one line, why nothing was fetched."""


def repository(pins: Pins) -> PurePosixPath:
    """Return the folder of a repository in a HF_HOME, where the clients look for it."""
    return PurePosixPath("hub", f"kernels--{pins.repo_id.replace('/', '--')}")


def snapshot_of(pins: Pins) -> PurePosixPath:
    """Return the folder of the pinned revision in a HF_HOME."""
    return repository(pins) / "snapshots" / pins.revision


def is_there(pins: Pins, names: Sequence[str], output: Path) -> bool:
    """Whether an output holds these variants already, intact; PrefetchError if it can neither stay nor be filled."""
    if not output.parent.is_dir():
        raise PrefetchError(f"there is no folder {output.parent}")
    if output.is_symlink() and not output.exists():
        raise PrefetchError(f"{output} is a link to {os.readlink(output)}, which is not there")
    if output.name.endswith(ARCHIVES) and output.exists():
        raise PrefetchError(f"{output} exists already")
    if output.exists() and not output.is_dir():
        raise PrefetchError(f"{output} is neither a folder nor named like an archive, {' or '.join(ARCHIVES)}")
    snapshot = output / snapshot_of(pins)
    if not snapshot.exists():
        return False
    lacking = [name for name in names if not (snapshot / "build" / name).exists()]
    if lacking:
        told = f"{snapshot} exists without {', '.join(lacking)}, and cannot be extended"
        raise PrefetchError(f"{told}: delete it and fetch all that you need, or choose another output")
    # The loader prefers a variant that lies there to those in build.
    problems = [f"{path.name} lies beside build" for path in sorted(snapshot.iterdir()) if path.name != "build"]
    problems += [fault for name in names for fault in faults(snapshot / "build" / name, pins.variants)]
    if problems:
        raise PrefetchError(f"{snapshot} exists and differs: {problems[0]}; delete it, or choose another output")
    return True


def write_reference(home: Path, pins: Pins, names: Sequence[str]) -> None:
    """Make the version that the variants are of lead to the pinned revision, at once or not at all.

    Raises VerificationError if they are of several versions.
    """
    variants = [home / snapshot_of(pins) / "build" / name for name in names]
    versions = {json.loads((variant / METADATA).read_text())["version"] for variant in variants}
    if len(versions) > 1:
        raise VerificationError(f"the variants are of several versions: {', '.join(map(str, sorted(versions)))}")
    reference = home / repository(pins) / f"refs/v{versions.pop()}"
    # Fetching again is no error for somebody who may only read the folder.
    if reference.is_file() and reference.read_bytes() == pins.revision.encode():
        return
    make_folder(reference.parent)
    with tempfile.TemporaryDirectory(prefix=".", dir=home / repository(pins)) as staging:
        written = Path(staging, reference.name)
        written.write_text(pins.revision)
        written.chmod(0o644)
        written.replace(reference)


def make_folder(folder: Path) -> None:
    """Make a folder that everybody may read, unless it is there: another process may have been faster."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    folder.chmod(0o755)


def move_into(home: Path, pins: Pins, names: Sequence[str], output: Path) -> bool:
    """Move the snapshot that `home` holds into the folder `output`, which may hold other revisions.

    Returns False if another process has put these variants there in the meantime, intact; PrefetchError if it has put
    something else there.
    """
    for folder in (PurePosixPath(), PurePosixPath("hub"), repository(pins), snapshot_of(pins).parent):
        make_folder(output / folder)
    try:
        (home / snapshot_of(pins)).rename(output / snapshot_of(pins))
    except OSError:
        if is_there(pins, names, output):
            return False
        raise
    return True


def write_archive(home: Path, file: Path) -> None:
    """Write what `home` holds into a .tar.gz; of one revision and the same variants it has the same bytes each time."""
    with file.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path in sorted(home.rglob("*")):
                archive.add(path, path.relative_to(home).as_posix(), recursive=False, filter=of_nobody)
    file.chmod(0o644)


def of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who fetched a file and when."""
    return entry.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False)
