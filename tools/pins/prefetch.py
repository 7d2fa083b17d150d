"""Fetch pinned variants once, into a folder or an archive from which they load without the Hub.

    python -m tools.pins.prefetch org/optimizer --revision <40 hex> --pins optimizer.pins.json --output models
    python -m tools.pins.prefetch org/optimizer --revision <40 hex> --pins optimizer.pins.json --output kernel.tar.gz

The folder is a HF_HOME, on another machine and for another user, too. An archive is unpacked into one:

    mkdir models && tar xzf kernel.tar.gz -C models
    HF_HOME=$PWD/models HF_HUB_OFFLINE=1 python train.py

There get_kernel by version and by revision, get_locked_kernel and load_kernel find it. `python -m tools.pins.verify`
checks it again where it has arrived; this prints the command. get_local_kernel loads the folder of the revision itself.

Variants without a pin are left out, and so is all that is no variant. The files are plain ones, not links, and nobody
may write beside them: Python leaves no bytecode there. The listing of the whole revision is left out: offline,
huggingface_hub 2.4.0 refuses a snapshot with less than its listing has, and takes one without a listing. A folder may
hold several revisions. Of one version, that which was fetched last is loaded by version.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import httpx2
from huggingface_hub import HfApi, snapshot_download
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tqdm.auto import tqdm

from tools.pins.pins_file import KERNEL, Pins, read_pins
from tools.pins.verify import VerificationError, faults, verify

ARCHIVES = (".tar.gz", ".tgz")


class PrefetchError(Exception):
    """A reason, in one line, why nothing was fetched."""


def repository(pins: Pins) -> PurePosixPath:
    """Return the folder of a repository in a HF_HOME, where the clients look for it."""
    return PurePosixPath("hub", f"kernels--{pins.repo_id.replace('/', '--')}")


def snapshot_of(pins: Pins) -> PurePosixPath:
    """Return the folder of the pinned revision in a HF_HOME."""
    return repository(pins) / "snapshots" / pins.revision


def read_pinned(file: Path, repo_id: str, revision: str) -> Pins:
    """Return the pins of this revision in a file of pins; PrefetchError if it has those of another one."""
    if not re.fullmatch("[0-9a-f]{40}", revision):
        raise PrefetchError(f"--revision must be a commit, 40 hexadecimal digits, got {revision!r}")
    pins = read_pins(file, repo_id)
    if pins.revision != revision:
        raise PrefetchError(f"{file} is for {repo_id} {pins.revision}, not for {repo_id} {revision}")
    return pins


def chosen(pins: Pins, names: Sequence[str]) -> tuple[str, ...]:
    """Return the variants to fetch, all that have a pin if none is named; PrefetchError unless the Hub has them all."""
    unpinned = sorted(set(names) - set(pins.variants))
    if unpinned or not pins.variants:
        raise PrefetchError(f"no pin for {', '.join(unpinned) or 'any variant'}; pinned: {', '.join(pins.variants)}")
    entries = HfApi().list_repo_tree(pins.repo_id, "build", revision=pins.revision, **KERNEL)
    published = {PurePosixPath(entry.path).name for entry in entries}
    wanted = tuple(dict.fromkeys(names or pins.variants))
    missing = sorted(set(wanted) - published)
    if missing:
        raise PrefetchError(f"{pins.repo_id} {pins.revision} has no {', '.join(missing)}, only {', '.join(published)}")
    return wanted


def is_there(pins: Pins, names: Sequence[str], output: Path) -> bool:
    """Whether an output holds these variants already, intact; PrefetchError if it can neither stay nor be filled."""
    if not output.parent.is_dir():
        raise PrefetchError(f"there is no folder {output.parent}")
    if output.name.endswith(ARCHIVES) and output.exists():
        raise PrefetchError(f"{output} exists already")
    if output.exists() and not output.is_dir():
        raise PrefetchError(f"{output} is neither a folder nor named like an archive, {' or '.join(ARCHIVES)}")
    snapshot = output / snapshot_of(pins)
    if not snapshot.exists():
        return False
    found = [fault for name in names for fault in faults(snapshot / "build" / name, pins.variants)]
    if found:
        raise PrefetchError(f"{snapshot} exists and differs: {found[0]}; delete it, or choose another output")
    return True


def fetch(pins: Pins, names: Sequence[str], home: Path, console: Console) -> None:
    """Make `home` a HF_HOME that holds these variants and nothing else.

    Raises VerificationError if a variant is not what its pin says, and the client's errors.
    """
    snapshot = home / snapshot_of(pins)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console) as progress:
        # Without the user's cache: what is damaged there would be taken, and could not be repaired by fetching again.
        snapshot_download(
            pins.repo_id,
            **KERNEL,
            revision=pins.revision,
            local_dir=snapshot,
            cache_dir=home / "no cache",
            allow_patterns=[f"build/{name}/*" for name in names],
            tqdm_class=bar_of(progress),
        )
    shutil.rmtree(snapshot / ".cache")
    variants = [verify(snapshot / "build" / name, pins.variants) for name in names]
    versions = {json.loads((variant / "metadata.json").read_text())["version"] for variant in variants}
    if len(versions) > 1:
        raise VerificationError(f"the variants are of several versions: {', '.join(map(str, sorted(versions)))}")
    reference = home / repository(pins) / f"refs/v{versions.pop()}"
    reference.parent.mkdir()
    reference.write_text(pins.revision)
    for path in (home, *home.rglob("*")):
        inside = path.is_relative_to(snapshot / "build")
        path.chmod((0o444 if inside else 0o644) if path.is_file() else (0o555 if inside else 0o755))


def bar_of(progress: Progress) -> type[tqdm]:
    """Return a class that the Hub's client takes for its bars, of which the one that counts files is shown."""

    class Bar(tqdm):
        def __init__(self, *positional, **options):
            super().__init__(*positional, **{**options, "disable": True})
            counts_files = options.get("unit") != "B"
            self.task = progress.add_task(options["desc"], total=options["total"]) if counts_files else None

        def update(self, n=1):
            if self.task is not None:
                progress.advance(self.task, n)

    return Bar


def move_into(home: Path, pins: Pins, output: Path) -> None:
    """Move what `home` holds into the folder `output`, which may hold other revisions; the reference goes last."""
    references = repository(pins) / "refs"
    for folder in (PurePosixPath(), PurePosixPath("hub"), repository(pins), snapshot_of(pins).parent, references):
        if not (output / folder).is_dir():
            (output / folder).mkdir()
            (output / folder).chmod(0o755)
    (home / snapshot_of(pins)).rename(output / snapshot_of(pins))
    for reference in (home / references).iterdir():
        reference.replace(output / references / reference.name)


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


def prefetch(pins: Pins, names: Sequence[str], output: Path, console: Console) -> bool:
    """Fill a folder or write an archive with these variants; return False if it holds them already.

    After an error the output is as it was. Raises what `is_there` and `fetch` raise.
    """
    if is_there(pins, names, output):
        return False
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as staging:
        home, archive = Path(staging, "home"), Path(staging, "archive")
        fetch(pins, names, home, console)
        if output.name.endswith(ARCHIVES):
            write_archive(home, archive)
            archive.rename(output)
        else:
            move_into(home, pins, output)
    return True


def described(pins: Pins, names: Sequence[str], output: Path, new: bool) -> Iterator[str]:
    """Yield what there is now, and the commands that use it."""
    yield f"{output} {'holds' if new else 'held already'} {pins.repo_id} {pins.revision}, verified:"
    yield from (f"  {name}  pin {pins.variants[name]}" for name in names)
    home = output
    if output.name.endswith(ARCHIVES):
        home = Path("models")
        yield f"  mkdir {home} && tar xzf {output.name} -C {home}"
    yield f"  python -m tools.pins.verify {home / snapshot_of(pins) / 'build'} --pins <your pins file>"
    yield f"  HF_HOME={home.resolve() if home is output else f'$PWD/{home}'} HF_HUB_OFFLINE=1 python <your program>"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo_id", help="such as org/optimizer")
    parser.add_argument("--revision", required=True, help="the commit on the Hub, 40 hexadecimal digits")
    parser.add_argument("--pins", type=Path, required=True, help="pins file of that revision")
    parser.add_argument("--output", type=Path, required=True, help="a folder, or an archive that ends in .tar.gz")
    parser.add_argument("--variant", action="append", default=[], help="fetch only this one; may be repeated")
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        pins = read_pinned(given.pins, given.repo_id, given.revision)
        names = chosen(pins, given.variant)
        new = prefetch(pins, names, given.output, console)
    except (PrefetchError, VerificationError, ValueError, OSError, httpx2.HTTPError) as error:
        said = str(error) if isinstance(error, VerificationError) else " ".join(str(error).split())
        print(f"tools.pins.prefetch: {said}", file=sys.stderr)
        return 1
    print("\n".join(described(pins, names, given.output, new)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
