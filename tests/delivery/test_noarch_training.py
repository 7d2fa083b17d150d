"""The package itself, without a library: published, loaded on platforms that no compiled variant fits, and training."""

from __future__ import annotations

import pytest

from tests.support.hub_clients import environment, run_client
from tools.build import variants
from tools.hub.server import Hub
from tools.pages.platforms import ALL_PLATFORMS, ARM, MAC, NEW, OLD, PLATFORMS

# The forks do not import again what the package and its first step take from torch.
CLIENT = """
import json, sys
from pathlib import Path
import torch._dynamo, torch.distributed.tensor
from tests.delivery.test_noarch_training import MACHINES
from tests.support.feigned_platforms import in_forks, trained
from tools.hub.publish import publish
from tools.hub.release import read_release

release = read_release(Path(sys.argv[1]), Path(sys.argv[2]), repo_id="org/optimizer", allow_dirty=True)
commit = publish(release).commit
calls = [(machine, machine.backends[0], torch, "org/optimizer", commit) for machine, torch, _ in MACHINES.values()]
print(json.dumps(dict(zip(MACHINES, in_forks(trained, calls)))))
"""


def platform_of(place: str, built_for: str):
    """Return the platform of the page."""
    (platform,) = (
        each for each in ALL_PLATFORMS if each.place.startswith(place) and each.built_for.startswith(built_for)
    )
    return platform


MACHINES = {
    "CUDA 12": (platform_of("Linux on x86", "CUDA 12"), NEW[-1], "torch-cuda"),
    "ROCm": (platform_of("Linux on x86", "ROCm"), NEW[-1], "torch-rocm"),
    "MPS": (platform_of(MAC, "MPS"), NEW[-1], "torch-metal"),
    "XPU": (platform_of("Linux on x86", "XPU"), NEW[-1], "torch-xpu"),
    "ARM": (platform_of(ARM, "CPUs"), NEW[-1], "torch-cpu"),
    "free-threaded": (platform_of("any, free", "CPUs"), NEW[-1], "torch-cpu"),
    "torch 2.10": (PLATFORMS[0], OLD[-1], "torch-cpu"),
}


@pytest.fixture(scope="module")
def seen(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    with pytest.MonkeyPatch.context() as patch:  # the platforms load what is built
        patch.setattr(variants, "load", lambda variant, job: "nothing")
        variants.build_variants(repository, ["noarch"], folder / "build")
    with Hub(folder / "hub", trusted=["org"]) as hub:
        return run_client(CLIENT, [repository, folder / "build"], environment(hub.endpoint, folder / "home"))


@pytest.mark.parametrize("machine", MACHINES)
def test_a_platform_without_a_compiled_variant_trains(seen, machine):
    """By operators of the variant's own name, which no library has brought."""
    assert seen[machine]["variant"] == MACHINES[machine][2]
    assert seen[machine]["losses"][-1] < 0.8 * seen[machine]["losses"][0]
    assert seen[machine]["rows"] == [["weight", "muon"], ["bias", "adamw"]]
    assert seen[machine]["operators"] > 0
