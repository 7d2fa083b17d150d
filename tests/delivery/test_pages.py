"""What the Card and the page on pinning tell users to run does run, with a Hub that has the package.

The variants are those without a library, which need no compiler. What stands in angle brackets is filled in.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.hub_clients import environment, run_client
from tests.support.pinned_kernels import HERE, pins_of, publish
from tools.build import variants
from tools.hub.server import Hub
from tools.pins import verify
from tools.pins.pins_file import Pins, write_pins

REPO_ID = "org/optimizer"
HF = Path(sys.executable).parent / "hf"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
# Of each page, its blocks one after the other; of all pages in one process, since importing torch takes seconds.
RUN = """
import contextlib, io, json, os, sys
import torch

folder, pages = sys.argv[1:]
os.chdir(folder)
results = []
for blocks in json.loads(pages):
    names, said = {"model": torch.nn.Sequential(torch.nn.Linear(8, 4))}, io.StringIO()
    with contextlib.redirect_stdout(said):
        for block in blocks:
            exec(block, names)
    results.append({"file": names["optimizer"].__file__, "said": said.getvalue()})
print(json.dumps(results))
"""
CHECKPOINT = """
import torch

state = optimizer.Muon(model.named_parameters(), lr=0.02).state_dict()
state["param_groups"][0]["build"] = "another one"
torch.save({"optimizer": state}, "checkpoint.pt")
"""


@dataclass(frozen=True)
class User:
    """A project with the two files that users keep, a cache, and the Hub with what they have pinned."""

    folder: Path
    endpoint: str
    revision: str
    pins: dict[str, str]

    def run(self, *pages: list[str], **variables: str) -> list[str]:
        """Run the blocks of pages and return what each page printed; each has to load what is published."""
        pins = json.dumps(self.pins).strip("{}")
        filled = json.dumps(pages).replace("<40 hex digits>", self.revision)
        filled = filled.replace(json.dumps('"<variant>": "<64 hex digits>"')[1:-1], json.dumps(pins)[1:-1])
        assert not re.search("<[0-9a-z ]+>", filled), "what else is to be filled in?"
        seen = run_client(RUN, [self.folder, filled], {**self.environment(), **variables})
        assert [page["file"] for page in seen] == [str(self.variant / "__init__.py")] * len(pages)
        return [page["said"] for page in seen]

    def environment(self) -> dict[str, str]:
        return environment(self.endpoint, self.folder / "home", PYTHONPATH=str(self.folder))

    @property
    def variant(self) -> Path:
        snapshots = self.folder / "home/hub/kernels--org--optimizer/snapshots"
        return snapshots / self.revision / "build" / HERE


@pytest.fixture(scope="module")
def build(repository, tmp_path_factory) -> Path:
    """The variants without a library, and the Card. Other tests import what is built."""
    folder = tmp_path_factory.mktemp("pages") / "build"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "load", lambda variant, job: "nothing")
        variants.build_variants(repository, ["noarch"], folder)
    return folder


@pytest.fixture(scope="module")
def card(build) -> str:
    return (build / "CARD.md").read_text()


@pytest.fixture(scope="module")
def published(build, tmp_path_factory):
    """A Hub, and the commit on it."""
    with Hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub.endpoint, publish(hub.endpoint, REPO_ID, build)


@pytest.fixture
def user(build, published, tmp_path) -> User:
    endpoint, revision = published
    pins = pins_of(build)
    write_pins(tmp_path / "optimizer.pins.json", Pins(REPO_ID, revision, pins))
    shutil.copy(verify.__file__, tmp_path / "verify.py")
    return User(tmp_path, endpoint, revision, pins)


def blocks(page: str, count: int) -> list[str]:
    """Return the blocks of Python of a page, of which there are `count`."""
    texts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(texts) == count
    return texts


def test_the_python_of_the_card_and_of_pinning_runs(user, card, repository):
    load, compare = blocks((repository / "docs/pinning.md").read_text(), 2)
    shown, compared = user.run(blocks(card, 3), [load, CHECKPOINT, compare])
    assert re.search(r"0\.weight +4x8 +muon", shown)
    assert compared == "The checkpoint is of another build: another one\n"


@pytest.mark.slow
def test_the_cards_python_runs_without_a_network_after_the_download(user, card):
    use, download, load = blocks(card, 3)
    subprocess.run(
        [sys.executable, "-c", download], env=user.environment(), capture_output=True, timeout=60, check=True
    )
    assert "`install_kernel` also needs `local_files_only=True`" in card
    user.run([use, load.replace(" trust_", " local_files_only=True, trust_")], **OFFLINE)


@pytest.mark.slow
def test_what_the_commands_of_pinning_download_loads_offline(user, repository):
    """By its commit; and by its version as well where the branch was asked for."""
    command = re.compile(rf"hf (download {REPO_ID} --repo-type kernel --revision (?:<40 hex>|v0))")
    by_commit, by_branch = command.findall((repository / "docs/pinning.md").read_text())
    load = f'import kernels\noptimizer = kernels.get_kernel("{REPO_ID}", %s, trust_remote_code=True)'
    revision, version = [load % 'revision="<40 hex digits>"'], [load % "version=0"]
    for words, loads in ((by_commit, [revision]), (by_branch, [revision, version])):
        shutil.rmtree(user.folder / "home", ignore_errors=True)
        words = words.replace("<40 hex>", user.revision).split()
        subprocess.run([HF, *words], env=user.environment(), capture_output=True, timeout=60, check=True)
        user.run(*loads, **OFFLINE)
