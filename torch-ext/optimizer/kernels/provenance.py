"""Which build of the package runs: what the builder wrote about it, and the pin that identifies it."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Optional

from .build_metadata import FILE, VARIANT, libraries, read_metadata


@dataclass(frozen=True)
class BuildInfo:
    """A build of the package; as text one line, which is what checkpoints keep in their groups as `build`.

    Every field is None where its builder said nothing, and all are where no builder has written a metadata.json, as in
    a tree of sources.
    """

    variant: Optional[str] = None  #: name of the variant's folder, such as torch-stable-abi211-cpu-x86_64-linux
    id: Optional[str] = None  #: namespace of its ops
    version: Optional[int] = None  #: of the package, as in `get_kernel(version=...)`
    commit: Optional[str] = None  #: of the sources, 40 hex digits; not the commit on the Hub
    dirty: Optional[bool] = None  #: whether the sources had uncommitted changes
    builder: Optional[str] = None  #: version of the program that built it
    pin: Optional[str] = None  #: sha256 of metadata.json, 64 hex digits; the digest there covers every other file
    kind: Optional[str] = None  #: `compiled`, or `portable` if no compiled library is in the folder

    def __str__(self) -> str:
        if self.pin is None:
            return "an unknown build"
        source = f"commit {self.commit}{' with changes' if self.dirty else ''}" if self.commit else "an unknown commit"
        return f"{self.variant}, version {self.version}, {source}, pin {self.pin}"


@functools.cache
def build_info() -> BuildInfo:
    """Return which build of the package this is, from the metadata.json beside its code. It needs no network."""
    metadata = read_metadata()
    if not metadata:
        return BuildInfo()
    provenance = metadata.get("provenance", {})
    source = provenance.get("kernel", {})
    return BuildInfo(
        variant=VARIANT.name,
        id=metadata.get("id"),
        version=metadata.get("version"),
        commit=source.get("commit"),
        dirty=source.get("dirty"),
        builder=provenance.get("kernel-builder", {}).get("version"),
        pin=hashlib.sha256(FILE.read_bytes()).hexdigest(),
        kind="compiled" if libraries() else "portable",
    )
