"""The whole way of a kernel, twice: build, publish, load; and both revisions in one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.hub_clients import environment, run_client, run_tool
from tests.support.toy_kernel import commit, git
from tools.build import commands
from tools.hub.server import Hub

TWO_REVISIONS = """
import json, sys
from functools import partial
from types import SimpleNamespace
import kernels as library, torch

backend, first, second, *lines = sys.argv[1:]
# Under the name that the lines use.
kernels = SimpleNamespace(get_kernel=partial(library.get_kernel, backend=backend))


def stepped(kernel):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(8, 16))
    parameter.grad = torch.randn(8, 16)
    kernel.Muon([parameter]).step()
    return parameter.tolist()


old, new = (kernels.get_kernel("org/optimizer", revision=revision) for revision in (first, second))
print(json.dumps({
    "modules": [old.__name__, new.__name__],
    "ops": [sys.modules[f"{kernel.__name__}._ops"].ops.name for kernel in (old, new)],
    "steps": [stepped(old), stepped(new)],
    "new": [kernels.get_kernel("org/optimizer", version=0) is new, eval(lines[0]) is new, eval(lines[1]) is new],
    "old": kernels.get_kernel("org/optimizer", revision="1.0") is old,
    "marks": [hasattr(old, "SECOND_REVISION"), hasattr(new, "SECOND_REVISION")],
}))
"""


def next_revision(repository: Path, root: Path) -> Path:
    """Copy the repository as it is on disk, and commit it with one more line in the package."""
    # With the user's configuration, unlike the toy's git: it may be what makes the repository a trusted one.
    names = commands.git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, names.split("\0")):
        if (repository / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / name, root / name)
    with (root / "torch-ext/optimizer/__init__.py").open("a") as file:
        file.write("SECOND_REVISION = True\n")
    git(root, "init", "--quiet")
    commit(root)
    return root


@pytest.mark.slow
def test_two_revisions_load_in_one_process(tmp_path, repository, variant, native_backend):
    """By version, commit and tag; each revision with ops of its own."""
    tree = next_revision(repository, tmp_path / "tree")
    with Hub(tmp_path / "hub", trusted=["org"]) as hub:
        variables = environment(hub.endpoint, tmp_path / "home")
        options = ["--build", variant.parent, "--allow-dirty", "--tag", "1.0"]
        built = run_tool(tree, "tools.build.variants", "--backend", native_backend, variables=variables)
        first = run_tool(repository, "tools.hub.publish", *options, variables=variables)
        second = run_tool(tree, "tools.hub.publish", "--tag", "1.1", variables=variables)
        assert not (built.returncode or first.returncode or second.returncode), (built, first, second)
        commits = [done.stdout.splitlines()[1].removeprefix("commit ") for done in (first, second)]
        lines = second.stdout.splitlines()[-2:]
        seen = run_client(TWO_REVISIONS, [native_backend, *commits, *map(str.strip, lines)], variables)
    assert seen["ops"] == seen["modules"] and len(set(seen["ops"])) == 2
    assert seen["steps"][0] == seen["steps"][1]
    assert seen["marks"] == [False, True]
    assert all(seen["new"]) and seen["old"]
