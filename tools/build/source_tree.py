"""Which commit a build comes from, and whether the files are that commit's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.build.commands import BuildError, git

# Bytes go into commits and out of them as they are, whatever the user has told git about the ends of lines.
AS_IT_IS = ("-c", "core.autocrlf=false", "-c", "core.attributesFile=")


@dataclass(frozen=True)
class Revision:
    """A commit; `dirty` if what is built may differ from it."""

    commit: str
    tree: str
    dirty: bool

    @property
    def unique_id(self) -> str:
        """The suffix of the op namespace. Equal files have equal names, whatever their history."""
        return self.tree[:7] + ("_dirty" if self.dirty else "")


def read_revision(root: Path, inputs: Sequence[Path]) -> Revision:
    """Return the revision of the repository at `root`; `inputs` are the built files, relative to it.

    Changes of tracked files make it dirty, as for the Hub's builder. Inputs that git does not track also make it dirty,
    because that builder would not see them.
    """
    try:
        commit, tree = git(root, "rev-parse", "HEAD", "HEAD^{tree}").split()
    except BuildError as error:
        raise BuildError(f"{root} has to be a git repository with a commit, which names the ops; {error}") from None
    changed = git(root, "status", "--porcelain", "--untracked-files=no")
    untracked = git(root, "ls-files", "--others", "--", *inputs) if inputs else ""  # without paths git lists all
    return Revision(commit, tree, dirty=bool(changed or untracked))


def clone_at(root: Path, commit: str, folder: Path) -> None:
    """Make the new `folder` a clone of `root` with the files of `commit`, for as long as `root` is there.

    Raises `BuildError` if `root` does not have the commit.
    """
    git(root, "clone", "--quiet", "--shared", "--no-checkout", root, folder)
    try:
        git(folder, *AS_IT_IS, "checkout", "--quiet", "--detach", commit)
    except BuildError:
        raise BuildError(f"commit {commit} is not in {root}: fetch it") from None
