"""Rarer moves of somebody who can write into a cache: other variants, links in odd places, files that are none."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from tests.support.attacks.tampering import Tampering, described, forged, linked, planted, put, variant_in
from tests.support.compiled_variants import FOREIGN_LIBRARY, NAME, compiled


def foreign_library(name: str) -> Tampering:
    """Put a library that runs foreign code when it is loaded into the variant."""
    return lambda cache: put(variant_in(cache) / name, compiled(FOREIGN_LIBRARY))


def renamed(name: str) -> Tampering:
    return lambda cache: variant_in(cache).rename(variant_in(cache).parent / name) and None


def swapped(first: str, second: str) -> Tampering:
    """Exchange two links, so that each leads to the other's blob."""

    def tamper(cache: Path) -> None:
        variant = variant_in(cache)
        targets = [os.readlink(variant / name) for name in (first, second)]
        linked(first, targets[1])(cache)
        linked(second, targets[0])(cache)

    return tamper


def other_variant_inside(cache: Path) -> None:
    """The files of another variant in the folder of the preferred one."""
    variant = variant_in(cache)
    shutil.rmtree(variant)
    shutil.copytree(variant.parent / "torch-cpu", variant)


def forged_variant_inside(name: str) -> Tampering:
    """A variant in the variant's folder, where `get_local_kernel` looks first."""

    def tamper(cache: Path) -> None:
        planted("torch-metal")(cache)
        inside = variant_in(cache) / name
        inside.parent.mkdir(exist_ok=True)
        (variant_in(cache).parent / "torch-metal").rename(inside)

    return tamper


def linked_blob(cache: Path) -> None:
    """A blob that is a link out of the cache."""
    blob = (variant_in(cache) / "scaling.py").resolve()
    outside = cache.parent / "outside.py"
    outside.write_text(forged(blob.read_text()))
    blob.unlink()
    blob.symlink_to(outside)


def linked_blobs(cache: Path) -> None:
    """The folder of blobs moved away, with a link in its place."""
    (cache / "blobs").symlink_to((cache / "blobs").rename(cache.parent / "blobs of others"))


def blob_by_another_name(cache: Path) -> None:
    """A link to the right content, whose name is the hash of something else."""
    name = "0" * 40
    shutil.copy(variant_in(cache) / "data.json", cache / "blobs" / name)
    linked("data.json", f"../../../../blobs/{name}")(cache)


def past_the_blobs(cache: Path) -> None:
    """A link that goes through the folder of blobs and out of it."""
    put(cache / "forged.py", forged("def scale(x):\n    return 2 * x\n"))
    linked("scaling.py", "../../../../blobs/../forged.py")(cache)


def linked_by(way: str) -> Tampering:
    """Put a link to the right blob by another way there, for which `way` has the cache and the blob's name."""

    def tamper(cache: Path) -> None:
        blob = os.path.basename(os.readlink(variant_in(cache) / "scaling.py"))
        here = os.path.relpath(cache, os.getcwd())
        linked("scaling.py", way.format(cache=cache, here=here, blob=blob))(cache)

    return tamper


def another_hard_link(cache: Path) -> None:
    """Put a forged file, which has another name out of the cache, in place of a blob."""
    blob = (variant_in(cache) / "scaling.py").resolve()
    put(cache.parent / "outside.py", forged(blob.read_text()))
    blob.unlink()
    blob.hardlink_to(cache.parent / "outside.py")


def linked_repository(cache: Path) -> None:
    """The whole repository moved away, with a link in its place."""
    cache.symlink_to(cache.rename(cache.with_name("repository of others")))


def other_snapshot(cache: Path) -> None:
    """A forged copy of the snapshot, and a link to it in place of the commit's."""
    (commit,) = (cache / "snapshots").iterdir()
    forgery = cache / "snapshots" / ("0" * 40)
    commit.rename(forgery)
    commit.symlink_to(forgery.name)
    module = forgery / "build" / NAME / "scaling.py"
    put(module, forged(module.read_text()))


def with_a_socket(cache: Path) -> None:
    here = os.getcwd()
    os.chdir(variant_in(cache))
    with socket.socket(socket.AF_UNIX) as open_socket:
        open_socket.bind("more")
    os.chdir(here)


def sparse(cache: Path) -> None:
    """A file of a terabyte that needs no room."""
    put(variant_in(cache) / "data.json", "")
    os.truncate(variant_in(cache) / "data.json", 2**40)


def folder(name: str) -> Tampering:
    def tamper(cache: Path) -> None:
        path = variant_in(cache) / name
        path.unlink(missing_ok=True)
        path.mkdir()

    return tamper


def pipe(name: str) -> Tampering:
    def tamper(cache: Path) -> None:
        path = variant_in(cache) / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return tamper


def device(name: str, number: int) -> Tampering:
    """Put a device of the system's memory in place of a file: 3 is empty, 5 has zeros without end."""

    def tamper(cache: Path) -> None:
        path = variant_in(cache) / name
        path.unlink(missing_ok=True)
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, number))
        except PermissionError:  # no root: a link there is the same to whoever reads
            path.symlink_to({3: "/dev/null", 5: "/dev/zero"}[number])

    return tamper


def raw(edit: Callable[[bytes], bytes]) -> Tampering:
    """Edit the bytes of metadata.json."""

    def tamper(cache: Path) -> None:
        metadata = variant_in(cache) / "metadata.json"
        put(metadata, edit(metadata.read_bytes()))

    return tamper


def with_digest(**changes: object) -> Tampering:
    """Change keys of the digest."""
    return described(lambda said: {**said, "digest": {**said["digest"], **changes}})
