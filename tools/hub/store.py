"""Repositories of a small Hub, in a folder: commits and blobs by content, branches and tags by name.

    <folder>/<organization>/<name>/refs.json           {"refs/heads/main": <commit>, "refs/tags/1.0": <commit>, ...}
                                  /commits/<sha>.json   parent, title, and the blob and size of every file
                                  /blobs/<oid>          bytes; oid is git's hash of a blob, as the clients compute it

Objects never change, and refs.json is replaced as a whole after the objects that it names are written: a commit is
there or it is not, whatever stops the process, and readers need no lock. One process at a time may write to a folder.
Paths of files are keys inside a commit, never paths on this disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]{0,94}\w)?", re.ASCII)
REF_NAME = re.compile(r"(?!refs/|.*(//|/\.|\.\.|\.lock$))\w([\w./-]{0,126}\w)?", re.ASCII)
SHA = re.compile(r"[0-9a-f]{40}")
UNSAFE = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")


class HubError(Exception):
    """A request that is refused: an HTTP status, and the code from which the clients choose their exception."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


class Blob(NamedTuple):
    oid: str
    size: int


@dataclass(frozen=True)
class Commit:
    """The whole tree after one change; `sha` hashes everything else, so equal histories have equal ids."""

    sha: str
    parent: str | None
    title: str
    description: str
    files: dict[str, Blob]


class Change(NamedTuple):
    """Write `content` to `path`, or delete it where content is None; a path that ends in / is a folder."""

    path: str
    content: bytes | None


@dataclass(frozen=True)
class Proposal:
    """A commit that somebody asks for; `parent`, where given, is the head that they have seen."""

    title: str
    description: str
    parent: str | None
    changes: list[Change]


class Store:
    """All repositories of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def create(self, organization: str, name: str) -> Repository:
        """Return a new repository with one empty commit on main."""
        repository = self._at(organization, name)
        with self._lock:
            if repository.exists():
                raise HubError(409, f"repository {organization}/{name} exists already")
            first = repository.write_commit(None, Proposal("initial commit", "", None, []), {})
            repository.write_refs({"refs/heads/main": first.sha})
        return repository

    def repository(self, organization: str, name: str) -> Repository:
        repository = self._at(organization, name)
        if not repository.exists():
            raise HubError(404, f"no repository {organization}/{name}", "RepoNotFound")
        return repository

    def has_organization(self, organization: str) -> bool:
        return bool(NAME.fullmatch(organization)) and (self.folder / organization).is_dir()

    def _at(self, organization: str, name: str) -> Repository:
        for part in (organization, name):
            if not NAME.fullmatch(part):
                raise HubError(
                    400,
                    f"a repository is organization/name, each of 1 to 96 letters, digits, '-', '_' and '.', without "
                    f"'--', '..' or a final '.git'; got {part!r}",
                )
        return Repository(self.folder / organization / name, self._lock)


class Repository:
    """One repository; every method that changes it takes the store's lock."""

    def __init__(self, folder: Path, lock: threading.Lock):
        self.folder = folder
        self._lock = lock

    def exists(self) -> bool:
        return (self.folder / "refs.json").is_file()

    def refs(self) -> dict[str, str]:
        """Commit of every ref: refs/heads/<branch>, refs/tags/<tag>."""
        return json.loads((self.folder / "refs.json").read_bytes())

    def resolve(self, revision: str) -> Commit:
        """Return the commit that a branch, a tag, a full ref or a full commit id names."""
        refs = self.refs()
        ref = find_ref(revision, refs)
        sha = refs[ref] if ref else revision
        path = self.folder / "commits" / f"{sha}.json"
        if not SHA.fullmatch(sha) or not path.is_file():
            raise HubError(404, f"no revision {revision!r}", "RevisionNotFound")
        stored = json.loads(path.read_bytes())
        stored["files"] = {name: Blob(*blob) for name, blob in stored["files"].items()}
        return Commit(sha, **stored)

    def read(self, blob: Blob) -> bytes:
        return (self.folder / "blobs" / blob.oid).read_bytes()

    def add_ref(self, kind: str, name: str, revision: str) -> None:
        """Name the commit of `revision`; kind is "heads" or "tags", and the two share their names."""
        if not REF_NAME.fullmatch(name) or SHA.fullmatch(name):
            raise HubError(400, f"not a name for a branch or a tag: {name!r}")
        with self._lock:
            refs = self.refs()
            if taken := find_ref(name, refs):
                raise HubError(409, f"{taken} exists already")
            self.write_refs({**refs, f"refs/{kind}/{name}": self.resolve(revision).sha})

    def commit(self, revision: str, proposal: Proposal) -> Commit:
        """Put a commit on top of a branch and return it."""
        with self._lock:
            refs = self.refs()
            ref = find_ref(revision, refs)
            if ref is None or ref.startswith("refs/tags/"):
                raise HubError(404, f"no branch {revision!r} to commit to", "RevisionNotFound")
            head = self.resolve(ref)
            if proposal.parent and not head.sha.startswith(proposal.parent):
                raise HubError(412, f"{revision} is at {head.sha}, not at the given parent {proposal.parent}")
            files = apply_changes(proposal.changes, head.files)
            for change in proposal.changes:
                if change.content is not None:
                    self._write(f"blobs/{blob_of(change.content).oid}", change.content)
            commit = self.write_commit(head.sha, proposal, files)
            self.write_refs({**refs, ref: commit.sha})
        return commit

    def write_commit(self, parent: str | None, proposal: Proposal, files: dict[str, Blob]) -> Commit:
        content = {"parent": parent, "title": proposal.title, "description": proposal.description, "files": files}
        data = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        sha = git_hash("commit", data)
        self._write(f"commits/{sha}.json", data)
        return Commit(sha, **content)

    def write_refs(self, refs: dict[str, str]) -> None:
        self._write("refs.json", json.dumps(refs, indent=1).encode())

    def _write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(data)
        os.replace(part, path)


def apply_changes(changes: list[Change], files: dict[str, Blob]) -> dict[str, Blob]:
    """Return the files after the changes, which are made in their order."""
    after = dict(files)
    for path, content in changes:
        check_path(path if content is not None else path.removesuffix("/"))
        if content is not None:
            after[path] = blob_of(content)
            continue
        gone = [name for name in after if name == path or (path.endswith("/") and name.startswith(path))]
        if not gone:
            raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for name in gone:
            del after[name]
    for name in after:
        for folder in PurePosixPath(name).parents:
            if str(folder) in after:
                raise HubError(400, f"{folder} cannot be a file and the folder of {name}")
    return after


def check_path(path: str) -> None:
    """Refuse what would leave a folder: the clients write these paths to their disk."""
    parts = path.split("/")
    if len(path) > 1024 or UNSAFE.search(path) or {"", ".", "..", ".git"} & set(parts):
        raise HubError(400, f"not a relative path of a file, with '/' between its parts: {path!r}")


def find_ref(revision: str, refs: dict[str, str]) -> str | None:
    candidates = (revision, f"refs/heads/{revision}", f"refs/tags/{revision}")
    return next((ref for ref in candidates if ref in refs), None)


def blob_of(content: bytes) -> Blob:
    return Blob(git_hash("blob", content), len(content))


def git_hash(kind: str, content: bytes) -> str:
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(content)) + content).hexdigest()
