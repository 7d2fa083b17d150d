"""docs/platforms.md and README.md say what the real loader does when it takes this machine for each platform."""

from __future__ import annotations

import pytest

from tests.support.hub_clients import environment, run_client, write_variant
from tools.build.recipe import read_build
from tools.build.released import COMPILED, PORTABLE, RELEASED
from tools.build.variants import plans
from tools.hub.server import Hub
from tools.pages import platforms
from tools.pages.markdown import fill

BUILT = ("cpu", "noarch")
TORCHES = (platforms.NEW[0], platforms.OLD[-1])

# What is published are variants in plain Python with the names of ours: the loader goes by names.
CLIENT = """
import json, sys
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi
from tests.support.feigned_platforms import in_forks, loaded_variant
from tests.delivery.test_platforms import TORCHES
from tools.pages.platforms import ALL_PLATFORMS

build, api, kind = Path(sys.argv[1]), HfApi(), {"repo_type": "kernel"}
api.create_repo("org/optimizer", **kind)
files = [CommitOperationAdd(f"build/{file.relative_to(build)}", file) for file in build.rglob("*.*")]
commit = api.create_commit("org/optimizer", files, commit_message="all", **kind).oid
calls = [
    (machine, machine.backends[-1], torch, "org/optimizer", commit) for machine in ALL_PLATFORMS for torch in TORCHES
]
print(json.dumps({"commit": commit, "loaded": in_forks(loaded_variant, calls)}))
"""


def test_the_page_and_the_readme_are_what_the_loader_says(repository):
    assert (repository / "docs/platforms.md").read_text() == platforms.page(), "run `python -m tools.pages.platforms`"
    readme = (repository / "README.md").read_text()
    assert readme == fill(readme, {"platforms": platforms.summary()}), "run `python -m tools.pages.platforms`"
    assert len(readme.splitlines()) <= 150


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("platforms")
    for name in RELEASED:
        write_variant(folder / "build" / name, "0000002", factor=2)
    with Hub(folder / "hub", trusted=["org"]) as hub:
        return run_client(CLIENT, [folder / "build"], environment(hub.endpoint, folder / "home"))


def test_the_real_loader_takes_what_the_page_says(seen):
    """On every platform, or it raises what the page shows, where lines have no order."""
    expected = []
    for machine in platforms.ALL_PLATFORMS:
        for torch in TORCHES:
            said = platforms.message(machine, torch, seen["commit"])
            expected.append(platforms.taken(machine, [torch]) or f"FileNotFoundError: {said}")
    assert list(map(without_order, seen["loaded"])) == list(map(without_order, expected))
    assert sum(what.startswith("FileNotFoundError") for what in expected) == len(TORCHES)  # TPUs


def without_order(said: str) -> tuple[str, list[str]]:
    first, *lines = said.splitlines()
    return first, sorted(lines)


def test_what_is_built_here_has_names_of_the_page(repository, tmp_path):
    """The compiled variant for CPUs, and all of those without a library."""
    tables = read_build(repository)
    named = {backend: [job.variant_name for job in plans(repository, tables, backend, tmp_path)] for backend in BUILT}
    assert set(named["cpu"]) < set(COMPILED)
    assert named["noarch"] == list(PORTABLE)


def test_a_platform_that_is_several_is_refused():
    machine = platforms.Platform("Linux", "CUDA", platforms.CUDA_12 + platforms.CUDA_13)
    with pytest.raises(ValueError, match="has to be several platforms"):
        platforms.taken(machine, platforms.NEW)
