"""What the real clients see of the Hub of tools/hub.py, with and without it, and how it is started."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

import pytest
from hub_clients import TOOLS, environment, run_client, write_variant

pytest.importorskip("hub", reason="tools/ is not here")
from hub import Hub

ONLINE = """
import contextlib, io, json, sys
from pathlib import Path
import kernels, torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion
from kernels.cli.versions import print_kernel_versions
from kernels.locking import lock_kernel_tree

old, new, lock_file = map(Path, sys.argv[1:])
api, repo, kind = HfApi(), "org/tiny", {"repo_type": "kernel"}


def additions(variant):
    return [CommitOperationAdd(f"build/{variant.name}/{f.name}", f) for f in sorted(variant.iterdir())]


def card():
    return [CommitOperationAdd("README.md", b"# proposed")]


def error(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as e:
        return type(e).__name__


def loaded(**options):
    kernel = kernels.get_kernel(options.pop("repo_id", repo), **options)
    return [kernel.scale(torch.ones(1)).item(), kernel.ops.name]


seen = {"created": api.create_repo(repo, **kind), "created again": api.create_repo(repo, exist_ok=True, **kind)}
api.create_branch(repo, branch="v1", **kind)
first = api.create_commit(repo, additions(old), commit_message="old", revision="v1", **kind).oid
api.create_tag(repo, tag="1.0", revision=first, **kind)
seen["unchanged"] = api.create_commit(repo, additions(old), commit_message="x", revision="v1", **kind).oid
second = api.upload_folder(
    folder_path=new.parent, path_in_repo="build", repo_id=repo, revision="v1", delete_patterns="*", **kind
).oid
proposed = api.create_commit(repo, card(), commit_message="x", revision="v1", create_pr=True, **kind)
seen |= {"first": first, "second": second, "proposed": [proposed.oid, proposed.pr_revision]}
seen["proposed files"] = api.list_repo_files(repo, revision="refs/pr/1", **kind)
refs = api.list_repo_refs(repo, include_pull_requests=True, **kind)
seen["refs"] = {r.ref: r.target_commit for r in refs.branches + refs.tags + refs.pull_requests}
seen["main files"] = api.list_repo_files(repo, **kind)
seen["errors"] = [
    error(api.create_repo, repo, **kind),
    error(api.repo_info, "org/absent", **kind),
    error(api.repo_info, repo, revision="absent", **kind),
    error(api.hf_hub_download, repo, "absent", revision="v1", **kind),
    error(api.create_commit, repo, card(), commit_message="x", revision=first, **kind),
    error(api.create_commit, repo, card(), commit_message="x", revision="v1", parent_commit=first, **kind),
    error(api.create_commit, repo, [CommitOperationDelete("absent")], commit_message="x", **kind),
]

dependency = KernelDependency(repo_id=repo, version=KernelVersion.Version(1))
lock_file.write_text(KernelLocks(locks={dependency: KernelLock(commit=first)}).to_json())
seen["locked"] = next(iter(lock_kernel_tree(dependency, api=api).values())).commit
seen["by version"] = loaded(version=1)
seen["by commit"] = loaded(revision=first)
seen["by tag"] = loaded(revision="1.0")
locked = kernels.get_locked_kernel(repo, lockfile=lock_file)
seen["by lock"] = [locked.scale(torch.ones(1)).item(), locked.ops.name]
seen["has"] = [kernels.has_kernel(repo, version=1), kernels.has_kernel(repo, revision=first)]
seen["variants"] = [d.variant.variant_str for d in kernels.get_kernel_variants(repo, version=1)]
with contextlib.redirect_stdout(io.StringIO()) as out:
    print_kernel_versions(repo)
seen["versions"] = out.getvalue()

api.create_repo("stranger/tiny", **kind)
api.create_commit("stranger/tiny", additions(old), commit_message="old", **kind)
seen["untrusted"] = error(loaded, repo_id="stranger/tiny", revision="main")
seen["allowed"] = loaded(repo_id="stranger/tiny", revision="main", trust_remote_code=["stranger/tiny"])

for revision in ("v1", first):
    snapshot_download(repo, revision=revision, **kind)
print(json.dumps(seen))
"""

OFFLINE = """
import json, sys
import kernels, torch
ones, lock_file = torch.ones(1), sys.argv[1]
locked = kernels.load_kernel("org/tiny", lockfile=lock_file)
latest = kernels.get_kernel("org/tiny", version=1)
print(json.dumps({"locked": locked.scale(ones).item(), "latest": latest.scale(ones).item()}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the clients saw: one session with a Hub, and one more, offline, after the Hub is gone."""
    folder = tmp_path_factory.mktemp("hub")
    old = write_variant(folder / "old/build/torch-universal", "aaaaaaa", factor=2)
    (old / "removed.py").touch()
    new = write_variant(folder / "new/build/torch-universal", "bbbbbbb", factor=3)
    with Hub(folder / "hub", trusted=["org"]) as hub:
        variables = environment(hub.endpoint, folder / "home")
        online = run_client(ONLINE, [old, new, folder / "kernels.lock"], variables)
    offline = run_client(OFFLINE, [folder / "kernels.lock"], {**variables, "HF_HUB_OFFLINE": "1"})
    return {**online, "offline": offline, "endpoint": hub.endpoint}


def test_a_repository_is_created_once(seen):
    assert seen["created"] == seen["created again"] == f"{seen['endpoint']}/kernels/org/tiny"


def test_branches_tags_and_pull_requests_name_commits(seen):
    assert seen["refs"].pop("refs/heads/main") not in (seen["first"], seen["second"])
    commit, ref = seen["proposed"]
    assert seen["refs"] == {"refs/heads/v1": seen["second"], "refs/tags/1.0": seen["first"], ref: commit}


def test_a_commit_on_one_branch_leaves_the_others_alone(seen):
    assert seen["main files"] == []


def test_a_pull_request_holds_the_branch_and_the_change(seen):
    files = {f"build/torch-universal/{name}" for name in ("__init__.py", "_ops.py", "metadata.json")}
    assert set(seen["proposed files"]) == files | {"README.md"}


def test_files_that_have_not_changed_make_no_commit(seen):
    assert seen["unchanged"] == seen["first"]


def test_the_clients_recognize_every_error(seen):
    assert seen["errors"] == [
        "HfHubHTTPError",
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
        "RemoteEntryNotFoundError",
        "RevisionNotFoundError",
        "HfHubHTTPError",
        "RemoteEntryNotFoundError",
    ]


def test_a_kernel_loads_by_version_commit_tag_and_lock_file(seen):
    old, new = [2.0, "_tiny_aaaaaaa"], [3.0, "_tiny_bbbbbbb"]
    assert (seen["by version"], seen["by commit"], seen["by tag"], seen["by lock"]) == (new, old, old, old)


def test_a_kernel_is_found_and_listed(seen):
    assert seen["has"] == [True, True]
    assert seen["variants"] == ["torch-universal"]
    assert "Version 1" in seen["versions"] and "torch-universal compatible, preferred" in seen["versions"]


def test_kernels_lock_takes_the_head_of_the_version(seen):
    assert seen["locked"] == seen["second"]


def test_only_trusted_organizations_load_without_consent(seen):
    assert seen["untrusted"] == "ValueError"
    assert seen["allowed"] == [2.0, "_tiny_aaaaaaa"]


def test_a_whole_snapshot_loads_without_a_hub(seen):
    assert seen["offline"] == {"locked": 2.0, "latest": 3.0}


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.168.0.1", "example.com"])
def test_only_this_machine_is_served(tmp_path, host):
    with pytest.raises(ValueError, match=r"need 127\.0\.0\.1"):
        Hub(tmp_path, host=host)


def test_the_command_prints_where_it_serves(tmp_path):
    command = [sys.executable, TOOLS / "hub.py", "--folder", tmp_path / "hub", "--trusted", "org"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            endpoint = server.stdout.readline().strip().removeprefix("export HF_ENDPOINT=")
            with urllib.request.urlopen(f"{endpoint}/api/organizations/org/overview", timeout=10) as answer:
                assert b'"trustedKernelPublisher": true' in answer.read()
        finally:
            server.terminate()


def test_the_command_refuses_other_addresses_in_one_line(tmp_path):
    command = [sys.executable, TOOLS / "hub.py", "--folder", tmp_path, "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("need 127.0.0.1, got '0.0.0.0'")
