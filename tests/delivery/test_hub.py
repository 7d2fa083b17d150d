"""What the real clients see of the Hub of tools/hub, with and without it, and how it is started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.support.hub_clients import environment, run_client, write_variant
from tools.hub.server import Hub

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
    return [CommitOperationAdd("README.md", b"# not there")]


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
seen |= {"first": first, "second": second}
refs = api.list_repo_refs(repo, **kind)
seen["refs"] = {r.ref: r.target_commit for r in refs.branches + refs.tags}
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


HOSTILE = {
    "ALL_PROXY": "socks5://127.0.0.1:9",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_TOKEN": "not ours",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HUGGINGFACE_HUB_CACHE": "/dev/null",
    "HUGGING_FACE_HUB_TOKEN": "not ours",
    "KERNELS_CACHE": "/dev/null",
    "LOCAL_KERNELS": "org/tiny=/dev/null",
    "TRANSFORMERS_OFFLINE": "1",
    "all_proxy": "socks5://127.0.0.1:9",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the clients saw: one session with a Hub, and one more, offline, after the Hub is gone.

    The caller's environment is as hostile as it can be, so that each test also says that none of it reaches them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in HOSTILE.items():
            patch.setenv(name, value)
        return sessions(tmp_path_factory)


def sessions(tmp_path_factory):
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


def test_branches_and_tags_name_commits(seen):
    assert seen["refs"].pop("refs/heads/main") not in (seen["first"], seen["second"])
    assert seen["refs"] == {"refs/heads/v1": seen["second"], "refs/tags/1.0": seen["first"]}


def test_a_commit_on_one_branch_leaves_the_others_alone(seen):
    assert seen["main files"] == []


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
    old, new = [2.0, "_tiny_cpu_aaaaaaa"], [3.0, "_tiny_cpu_bbbbbbb"]
    assert (seen["by version"], seen["by commit"], seen["by tag"], seen["by lock"]) == (new, old, old, old)


def test_a_kernel_is_found_and_listed(seen):
    assert seen["has"] == [True, True]
    assert seen["variants"] == ["torch-universal"]
    assert "Version 1" in seen["versions"] and "torch-universal compatible, preferred" in seen["versions"]


def test_kernels_lock_takes_the_head_of_the_version(seen):
    assert seen["locked"] == seen["second"]


def test_only_trusted_organizations_load_without_consent(seen):
    assert seen["untrusted"] == "ValueError"
    assert seen["allowed"] == [2.0, "_tiny_cpu_aaaaaaa"]


def test_a_whole_snapshot_loads_without_a_hub(seen):
    assert seen["offline"] == {"locked": 2.0, "latest": 3.0}


def test_only_one_loopback_address_is_served(tmp_path):
    with Hub(tmp_path) as hub:
        port = int(hub.endpoint.removeprefix("http://127.0.0.1:"))
        # One that listens everywhere would answer here, too.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=10)


def test_the_command_prints_where_it_serves(tmp_path, repository):
    command = [sys.executable, "-m", "tools.hub.server", "--folder", tmp_path / "hub", "--trusted", "org"]
    with subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True) as server:
        try:
            endpoint = server.stdout.readline().strip().removeprefix("export HF_ENDPOINT=")
            with urllib.request.urlopen(f"{endpoint}/api/organizations/org/overview", timeout=10) as answer:
                assert json.load(answer)["trustedKernelPublisher"]
        finally:
            server.terminate()


def test_a_port_that_is_taken_is_one_line(tmp_path, repository):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [
            sys.executable,
            "-m",
            "tools.hub.server",
            "--folder",
            tmp_path,
            "--port",
            str(taken.getsockname()[1]),
        ]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "in use" in done.stderr.splitlines()[-1]
