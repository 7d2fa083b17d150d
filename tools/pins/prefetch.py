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
hold several revisions. Of one version, that which was fetched last is loaded by version, even if it was there before.
A revision that has anything beside its folder `build`, as in the client's cache, is refused: it might be loaded.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, snapshot_download
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tqdm.auto import tqdm

from tools.pins.hf_home import ARCHIVES, PrefetchError, is_there, move_into, snapshot_of, write_archive, write_reference
from tools.pins.pins_file import CLIENT_ERRORS, KERNEL, Pins, read_pins
from tools.pins.verify import VerificationError, verify


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
    published = sorted(PurePosixPath(entry.path).name for entry in entries)
    wanted = tuple(dict.fromkeys(names or pins.variants))
    missing = sorted(set(wanted) - set(published))
    if missing:
        raise PrefetchError(f"{pins.repo_id} {pins.revision} has no {', '.join(missing)}, only {', '.join(published)}")
    return wanted


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
    for name in names:
        verify(snapshot / "build" / name, pins.variants)
    write_reference(home, pins, names)
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


def prefetch(pins: Pins, names: Sequence[str], output: Path, console: Console) -> bool:
    """Fill a folder or write an archive with these variants; return False if it holds them already.

    After an error in `fetch` the output is as it was. Raises what `is_there` and `fetch` raise.
    """
    new = not is_there(pins, names, output) and fetch_into(pins, names, output, console)
    if not output.name.endswith(ARCHIVES):
        write_reference(output, pins, names)
    return new


def fetch_into(pins: Pins, names: Sequence[str], output: Path, console: Console) -> bool:
    """Fetch into an output that lacks these variants; return False if another process was faster."""
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as staging:
        home, archive = Path(staging, "home"), Path(staging, "archive")
        fetch(pins, names, home, console)
        if output.name.endswith(ARCHIVES):
            write_archive(home, archive)
            archive.rename(output)
            return True
        return move_into(home, pins, names, output)


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
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        pins = read_pinned(options.pins, options.repo_id, options.revision)
        names = chosen(pins, options.variant)
        new = prefetch(pins, names, options.output, console)
    except (PrefetchError, VerificationError, *CLIENT_ERRORS) as error:
        message = str(error) if isinstance(error, VerificationError) else " ".join(str(error).split())
        print(f"tools.pins.prefetch: {message}", file=sys.stderr)
        return 1
    print("\n".join(described(pins, names, options.output, new)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
