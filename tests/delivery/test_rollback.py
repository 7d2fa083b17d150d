"""tools/hub/rollback.py: nothing comes back of which nothing was compared."""

from __future__ import annotations

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from tests.support.pinned_kernels import released
from tools.hub.rollback import roll_back
from tools.hub.server import Hub
from tools.pins.pins_file import KERNEL, read_pins

# What might run, and where: a benchmark of another name, no variant, a variant beside build, a module of the root.
STRANGERS = [
    "__init__.py",
    "benchmarks/benchmark_more/__init__.py",
    "benchmarks/sweep.py",
    "build/evil/__init__.py",
    "build/stray.py",
    "torch-universal/__init__.py",
]


@pytest.fixture
def branch(tmp_path):
    """A client, the pins of the variant on v0, and how to commit empty files to v0 and delete others."""
    with Hub(tmp_path / "hub") as hub:
        release = released(hub.endpoint, tmp_path / "release", {"torch-cpu": 2})
        api = HfApi(endpoint=hub.endpoint, token=False)

        def commit(add=(), delete=()) -> str:
            changes = [CommitOperationAdd(path, b"") for path in add] + [CommitOperationDelete(path) for path in delete]
            return api.create_commit("org/tiny", changes, commit_message="More", revision="v0", **KERNEL).oid

        yield api, read_pins(release.pins, "org/tiny").variants, commit


def files(api: HfApi) -> list[str]:
    return sorted(api.list_repo_files("org/tiny", revision="v0", **KERNEL))


@pytest.mark.parametrize("pinned", [True, False])
def test_a_commit_with_files_of_no_variant_is_refused_with_their_names(branch, pinned):
    api, pins, commit = branch
    to = commit(STRANGERS)
    head = commit(delete=STRANGERS)
    with pytest.raises(ValueError) as refused:
        roll_back(api, "org/tiny", to, pins if pinned else None)
    unpinned = ["torch-cpu: ../torch-universal lies beside it without a pin, and the loader might prefer it"]
    lines = [f"{path} is of no variant, and so nothing is compared with it" for path in STRANGERS]
    assert str(refused.value).splitlines() == [f"{to} cannot come back:", *(unpinned if pinned else []), *lines]
    assert {ref.name: ref.target_commit for ref in api.list_repo_refs("org/tiny", **KERNEL).branches}["v0"] == head


def test_the_variants_and_the_page_come_back_and_nothing_else(branch):
    """Benchmarks, which every release has and no pin covers, are those of neither commit."""
    api, pins, commit = branch
    variant = [path for path in files(api) if path.startswith("build/torch-cpu/")]
    to = commit(["README.md", ".gitattributes", "benchmarks/benchmark.py", "benchmarks/benchmark_old.py"])
    commit(["stray.py", "benchmarks/benchmark_new.py"], delete=["README.md", *variant])
    assert roll_back(api, "org/tiny", to, pins)[1] == pins
    assert files(api) == sorted([".gitattributes", "README.md", *variant])


@pytest.mark.parametrize("pinned", [True, False])
def test_a_commit_without_variants_is_refused(branch, pinned):
    """As the last one of main, which has the page alone."""
    api, pins, commit = branch
    to = commit(["README.md"], delete=[path for path in files(api) if path.startswith("build/")])
    commit(["stray.py"])
    with pytest.raises(ValueError) as refused:
        roll_back(api, "org/tiny", to, pins if pinned else None)
    missing = ["torch-cpu has a pin and is not there"] if pinned else []
    assert str(refused.value).splitlines() == [f"{to} cannot come back:", "it has no variant", *missing]
