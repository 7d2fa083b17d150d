"""What becomes of a client with an empty cache that meets a lie, and of the same cache when the Hub is honest again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.support.attacks.forgeries import MARKER, contents
from tests.support.attacks.forked_clients import Call, Clients
from tests.support.attacks.guarded_loads import REPO_ID
from tests.support.attacks.hub_faults import faults
from tests.support.attacks.hub_lies import lies
from tests.support.attacks.lying_hub import Lie, LyingHub
from tests.support.hub_clients import environment, write_variant
from tools.hub.server import Hub
from tools.hub.store import Change, Store
from tools.pins.verify import pin_of

WITH_PIN, WITHOUT_PIN = "with_pin", "without_pin"
# In seconds. A load takes a fifth of one; where no timeout is the client's, this one is.
LIMIT = 20.0
WORKERS = 4


@dataclass(frozen=True)
class Load:
    """How one load ended: honest, changed (what was imported is not what was published), refused, error, hung or died.

    `ran` says whether foreign Python ran meanwhile; `said` is the error's text.
    """

    end: str
    ran: bool
    said: str = ""

    @property
    def safe(self) -> bool:
        return self.end != "changed" and not self.ran


@dataclass(frozen=True)
class Trial:
    """A lie, the load that met it, the load after it from the same cache, and the same once the cache was deleted.

    The last is None where the second is honest. `escaped` names what the client wrote outside of its cache.
    """

    name: str
    group: str
    first: Load
    second: Load
    third: Load | None
    escaped: tuple[str, ...]

    @property
    def safe(self) -> bool:
        return self.first.safe and self.second.safe


class Release:
    """A Hub's folder with two releases of a kernel in plain Python; the newer one is what `pin` and `commit` name."""

    def __init__(self, folder: Path):
        store = Store(folder / "hub")
        store.create(REPO_ID)
        repository = store.repository(REPO_ID)
        repository.add_ref("refs/heads/v1", "main")
        commits = []
        for factor, uid in enumerate(("0ddba11", "ba5eba1"), start=2):
            self.variant = write_variant(folder / uid / "build/torch-cpu", uid, factor)
            changes = [Change(f"build/torch-cpu/{path}", each) for path, each in contents(self.variant).items()]
            commits.append(repository.commit("v1", uid, changes))
        self.older, self.commit = commits
        self.folder = folder / "hub"
        self.pin = pin_of(self.variant)

    def wanted(self, by: str) -> dict[str, Any]:
        """Return what a load asks for, by what its `Lie` says."""
        asked = {"version": {"version": 1}, "branch": {"revision": "v1"}}.get(by, {"revision": self.commit})
        trust = {} if by == "publisher" else {"trust_remote_code": [REPO_ID]}
        return {**asked, **trust, "backend": "cpu"}  # by name, because the torch of this machine may be for GPUs


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """Yield a stage for trials, with a release, its Hub and a process of clients."""
    release = Release(folder)
    with ExitStack() as stack:
        hub = stack.enter_context(Hub(release.folder, trusted=["org"]))
        yield Stage(folder, release, hub.endpoint, stack.enter_context(Clients()))


@dataclass(frozen=True)
class Stage:
    folder: Path
    release: Release
    endpoint: str
    clients: Clients

    def lies(self, outside: Path) -> list[Lie]:
        """Return fresh ones, which have not been told yet."""
        return [*faults(), *lies(self.release.variant, outside, self.release.older)]

    def trials(self, way: str, names: Iterable[str] | None = None) -> list[Trial]:
        """Return the trials of the lies with these names (None: of all), each with an empty cache."""
        names = [lie.name for lie in self.lies(self.folder)] if names is None else names
        place = Path(mkdtemp(dir=self.folder))
        with ThreadPoolExecutor(WORKERS) as pool:
            numbered = [(place / str(number), name) for number, name in enumerate(names)]
            return list(pool.map(lambda each: self.trial(way, *each), numbered))

    def trial(self, way: str, folder: Path, name: str) -> Trial:
        (folder / "home").mkdir(parents=True)
        lie = next(lie for lie in self.lies(folder / "outside") if lie.name == name)
        first = self.load(way, folder, lie, lie.by)
        # As the user goes on, whose pinned commit the lie cannot move.
        second, third = self.load(way, folder, None), None
        if second.end != "honest":
            shutil.rmtree(folder / "home/hub", ignore_errors=True)
            third = self.load(way, folder, None)
        escaped = {path.name for path in folder.iterdir()} - {"home", "ran"}
        return Trial(name, lie.group, first, second, third, tuple(sorted(escaped)))

    def load(self, way: str, folder: Path, lie: Lie | None, by: str = "commit") -> Load:
        with LyingHub(self.endpoint, lie) as hub:
            return self.ended(self.started(way, folder, hub.endpoint, by), folder)

    def started(self, way: str, folder: Path, endpoint: str, by: str = "commit", *more: Any) -> Call:
        """Start a load, which has `more` as its first arguments and its cache in folder/home."""
        variables = environment(endpoint, folder / "home", **{MARKER: str(folder / "ran")})
        arguments = (*more, self.release.wanted(by), self.release.pin, True)
        return self.clients.start(variables, f"tests.support.attacks.guarded_loads:{way}", *arguments)

    def ended(self, call: Call, folder: Path, limit: float = LIMIT) -> Load:
        """Return how a load ended, after waiting for it."""
        done, marker = call.result(limit), folder / "ran"
        ran = marker.exists()
        marker.unlink(missing_ok=True)
        if done["end"] == "loaded":
            honest = contents(Path(done["folder"])) == contents(self.release.variant)
            return Load("honest" if honest else "changed", ran, json.dumps(done))
        return Load(done["end"], ran, done["error"])
