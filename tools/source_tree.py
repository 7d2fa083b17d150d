"""Which commit a build comes from, and whether the files are that commit's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commands import BuildError, run


@dataclass(frozen=True)
class Revision:
    """A commit; `dirty` if what is built may differ from it."""

    commit: str
    tree: str
    dirty: bool

    @property
    def unique_id(self) -> str:
        """The suffix of the op namespace: equal files have equal names, whatever the history."""
        return self.tree[:7] + ("_dirty" if self.dirty else "")


def read_revision(root: Path, inputs: Sequence[Path]) -> Revision:
    """Return the revision of the repository at `root`; `inputs` are the built files, relative to it.

    Changes of tracked files make it dirty, as for the Hub's builder; so do inputs that git does not track,
    which that builder would not see.
    """
    try:
        commit, tree = run(["git", "rev-parse", "HEAD", "HEAD^{tree}"], cwd=root).split()
    except BuildError as error:
        raise BuildError(f"{root} has to be a git repository with a commit, which names the ops; {error}") from None
    changed = run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=root)
    untracked = run(["git", "ls-files", "--others", "--", *inputs], cwd=root)
    return Revision(commit, tree, dirty=bool(changed or untracked))
