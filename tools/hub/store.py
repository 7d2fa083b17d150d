"""Repositories of a small Hub: in a folder, a bare git repository <organization>/<name> for each.

A branch moves only after the objects of its commit are written, so a commit exists completely or not at all, whatever
stops the process. One thread at a time may write. Paths of files are names inside git's trees, never paths on this
disk.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from dulwich.errors import RefFormatError
from dulwich.object_store import commit_tree_changes
from dulwich.objects import Blob, Commit, Tree, TreeEntry
from dulwich.objectspec import parse_commit
from dulwich.repo import Repo
from huggingface_hub.utils import validate_repo_id

FIRST_REF = "refs/heads/main"
REGULAR_FILE = 0o100644
UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")


class HubError(Exception):
    """A refused request: an HTTP status, and the code from which the clients choose their exception."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


class Change(NamedTuple):
    """Write `content` to `path`; with content None, delete the file or folder there."""

    path: str
    content: bytes | None


class Store:
    """All repositories of a folder, by name. A name from a request becomes a path only once it is known or checked."""

    def __init__(self, folder: Path):
        self._folder = folder
        paths = [main.parents[2] for main in folder.glob(f"*/*/{FIRST_REF}")]
        self._repositories = {path.relative_to(folder).as_posix(): Repository(Repo(path)) for path in paths}

    def create(self, repo_id: str) -> bool:
        """Make a repository with one empty commit on main, at once or not at all, and return whether it is new."""
        if repo_id in self._repositories:
            return False
        try:
            validate_repo_id(repo_id)
        except ValueError as error:
            raise HubError(400, str(error)) from None
        path = self._folder / repo_id
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the organizations, where none of its names is a repository's, until it has its first commit.
        with tempfile.TemporaryDirectory(dir=self._folder) as unfinished:
            Repository(Repo.init_bare(unfinished, default_branch=b"main", object_format="sha1")).start()
            Path(unfinished).rename(path)
        self._repositories[repo_id] = Repository(Repo(path))
        return True

    def repository(self, repo_id: str) -> Repository:
        if repo_id not in self._repositories:
            raise HubError(404, f"no repository {repo_id}", "RepoNotFound")
        return self._repositories[repo_id]

    def organizations(self) -> set[str]:
        return {repo_id.partition("/")[0] for repo_id in self._repositories}


class Repository:
    def __init__(self, git: Repo):
        self._git = git

    def start(self) -> None:
        empty = Tree()
        self._git.object_store.add_object(empty)
        self._advance(FIRST_REF, [], "initial commit", empty.id)

    def refs(self) -> dict[str, str]:
        """Commit of every ref: refs/heads/<branch>, refs/tags/<tag>."""
        return {ref.decode(): sha.decode() for ref, sha in self._git.get_refs().items() if ref != b"HEAD"}

    def resolve(self, revision: str) -> str:
        """Return the id of the commit that an id, a branch, a tag or a full ref names; no ref can hide an id."""
        try:
            return parse_commit(self._git, revision).id.decode()
        except (KeyError, ValueError, RefFormatError):
            raise HubError(404, f"no revision {revision!r}", "RevisionNotFound") from None

    def entries(self, sha: str) -> dict[str, TreeEntry]:
        """All files and folders of a commit, by path."""
        tree = self._git[sha.encode()].tree
        entries = self._git.object_store.iter_tree_contents(tree, include_trees=True)
        return {entry.path.decode(): entry for entry in entries if entry.path}

    def read(self, entry: TreeEntry) -> bytes:
        return self._git[entry.sha].as_raw_string()

    def add_ref(self, ref: str, revision: str) -> None:
        """Name the commit of `revision`. A branch and a tag cannot have the same name."""
        sha, name = self.resolve(revision), ref.split("/", 2)[2]
        if {f"refs/heads/{name}", f"refs/tags/{name}"} & self.refs().keys():
            raise HubError(409, f"{name} exists already")
        try:
            self._git.refs[ref.encode()] = sha.encode()
        except RefFormatError:
            raise HubError(400, f"not a name for a branch or a tag: {name!r}") from None

    def commit(self, revision: str, title: str, changes: list[Change], parent: str | None = None) -> str:
        """Put a commit on top of a branch and return its id. `parent`, if given, is the head that the client saw."""
        ref = f"refs/heads/{revision.removeprefix('refs/heads/')}"
        head = self.refs().get(ref)
        if head is None:
            raise HubError(404, f"no branch {revision!r} to commit to", "RevisionNotFound")
        if parent and not head.startswith(parent):
            raise HubError(412, f"{revision} is at {head}, not at the given parent {parent}")
        tree = self._git[head.encode()].tree
        try:
            tree = commit_tree_changes(self._git.object_store, tree, [self._edit(*change) for change in changes])
        except KeyError as error:
            raise HubError(404, f"A file with this name doesn't exist: {error}", "EntryNotFound") from None
        return self._advance(ref, [head.encode()], title, tree)

    def _edit(self, path: str, content: bytes | None) -> tuple[bytes, int | None, bytes | None]:
        if content is None:
            return path.encode(), None, None
        check_path(path)
        blob = Blob.from_string(content)
        self._git.object_store.add_object(blob)
        return path.encode(), REGULAR_FILE, blob.id

    def _advance(self, ref: str, parents: list[bytes], title: str, tree: bytes) -> str:
        """Commit a tree; author and time are always the same, so that equal histories have equal ids."""
        commit = Commit()
        commit.tree, commit.parents, commit.message = tree, parents, title.encode()
        commit.author = commit.committer = b"Hub <hub@localhost>"
        commit.author_time = commit.author_timezone = commit.commit_time = commit.commit_timezone = 0
        self._git.object_store.add_object(commit)
        self._git.refs[ref.encode()] = commit.id
        return commit.id.decode()


def check_path(path: str) -> None:
    """Refuse paths that would leave a folder, because the clients write these paths to their disk."""
    if UNSAFE.search(path) or {"", ".", "..", ".git"} & set(path.split("/")):
        raise HubError(400, f"not a relative path of a file, with '/' between its parts: {path!r}")
