"""The lab's results: a line of JSON for each item, written as soon as it is known, so that a run can be resumed."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "records.jsonl"
# An item's problem while it is running, with its time limit. It stays if the item never ends.
UNFINISHED = "it ended its process, or did not end in {} s"
# The problem of an item that was running when the time of its stage ended.
INTERRUPTED = "the time of the stage ended first"

# Items with these statuses need not run again.
DONE = ("ok", "skipped")


@dataclass(frozen=True)
class Record:
    """When and how an item ended: `ok`, `failed` with its `problem`, or `skipped` with the reason.

    `cut` means that time ended before the item did, or before it began; `value` is what it has found until then.
    """

    stage: str
    key: str
    status: str
    seconds: float
    problem: str = ""
    value: object = None
    at: float = field(default_factory=time.time)


class Records:
    """The records in a folder that belong to one `identity`: a device, a commit, versions.

    Records of another identity are put aside in a file of their own, and taken back when their identity returns.
    """

    def __init__(self, folder: Path, identity: dict):
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.identity = folder / FILE, identity
        before, stash = read(self.file), aside(folder, identity)
        self.put_aside = aside(folder, before[0]) if before is not None and before[0] != identity else None
        if self.put_aside is not None:
            self.file.replace(self.put_aside)
        if not self.file.exists() and stash.exists():
            stash.replace(self.file)
        kept = (read(self.file) or (identity, []))[1]
        # Rewritten completely, because a killed run may have left half a line.
        write_whole(self.file, "".join(f"{json.dumps(line)}\n" for line in [identity, *map(asdict, kept)]))

    @property
    def digest(self) -> str:
        """What stands for the identity in names of files."""
        return digest_of(self.identity)

    @property
    def all(self) -> list[Record]:
        """The newest record of each item."""
        return read(self.file)[1]

    def of(self, stage: str) -> dict[str, Record]:
        """Return the records of a stage by the keys of their items."""
        return {record.key: record for record in self.all if record.stage == stage}

    def done(self, stage: str, since: float) -> list[str]:
        """Return the keys of items that need not run again.

        Items that failed before `since` may be tried once more. Items that were cut are still to do.
        """
        entries = self.of(stage).items()
        return [
            key
            for key, record in entries
            if record.status in DONE or (record.status == "failed" and record.at >= since)
        ]

    def ended(self, stage: str, since: float) -> list[str]:
        """Return the keys of items that have run since then, to their end or not; those that were cut have not."""
        return [key for key, record in self.of(stage).items() if record.at >= since and record.status != "cut"]

    def left(self, stage: str) -> list[str]:
        """Return the keys of items that time was too short for."""
        return [key for key, record in self.of(stage).items() if record.status == "cut"]


def aside(folder: Path, identity: dict) -> Path:
    """Return the file for records of an identity while the folder's records are of another."""
    return folder / f"records.{digest_of(identity)}.jsonl"


def digest_of(identity: dict) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def write_whole(file: Path, text: str) -> None:
    """Write a file that appears all at once, as the process may be killed at any time."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(file)


def append(file: Path, record: Record) -> None:
    """Write a record, which replaces an older one of the same item."""
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(record)) + "\n")


def read(file: Path) -> tuple[dict, list[Record]] | None:
    """Return the identity and the newest record of each item in a file; None if there is no readable identity."""
    lines = file.read_text().splitlines() if file.exists() else []
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:  # a line that was cut off when a run ended
            continue
    if not entries:
        return None
    newest = {(fields["stage"], fields["key"]): Record(**fields) for fields in entries[1:]}
    return entries[0], list(newest.values())


def clock(seconds: float) -> str:
    """Return seconds as minutes and seconds, such as 1:05."""
    return f"{int(max(seconds, 0)) // 60}:{int(max(seconds, 0)) % 60:02}"
