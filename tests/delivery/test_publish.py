"""tools/hub/publish.py, with the real client, to the Hub of tools/hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError

from tests.support.hub_clients import environment, run_client, run_tool, write_variant
from tools.build.commands import BuildError
from tools.hub.publish import Published, is_trusted, read_release
from tools.hub.server import Hub

SESSION = """
import json, sys
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi
from tools.hub.publish import publish, read_release

trees, kind = Path(sys.argv[1]), {"repo_type": "kernel"}
api, seen = HfApi(), {}


def files(revision):
    return sorted(api.list_repo_files("org/tiny", revision=revision, **kind))


def published(tree, **options):
    done = publish(read_release(trees / tree), **options)
    seen[tree] = {**vars(done), "lines": done.load_lines(), "files": files(done.branch)}
    return done


def refusal(tree, **options):
    heads = api.list_repo_refs("org/tiny", **kind)
    try:
        publish(read_release(trees / tree), **options)
    except ValueError as error:
        return [str(error), api.list_repo_refs("org/tiny", **kind) == heads]


api.create_repo("org/tiny", **kind)
there = [CommitOperationAdd(path, b"") for path in (".gitattributes", "stray", "build/torch-cuda/stray.py")]
api.create_commit("org/tiny", there, commit_message="there before", **kind)
seen["told"] = []
published("two variants", tag="1.0", progress=seen["told"].append)
seen["again"] = publish(read_release(trees / "two variants")).commit
published("one variant")
seen["tag"] = [(ref.name, ref.target_commit) for ref in api.list_repo_refs("org/tiny", **kind).tags]
seen["tag taken"] = refusal("one variant", tag="1.0")
published("next version")
seen["main"] = files("main")
seen["card"] = Path(api.hf_hub_download("org/tiny", "README.md", **kind)).read_text()
print(json.dumps(seen))
"""

BUILD_TOML = '[general]\nname = "tiny"\nversion = {version}\n[general.hub]\nrepo-id = "org/tiny"\n'


def write_tree(root: Path, version: int = 1, variants: tuple[str, ...] = ("torch-cpu",), factor: int = 2) -> Path:
    for folder in ("benchmarks", "build"):
        (root / folder).mkdir(parents=True)
    (root / "build.toml").write_text(BUILD_TOML.format(version=version))
    (root / "benchmarks/benchmark.py").write_text("# for the Hub\n")
    (root / "benchmarks/sweep.py").write_text("# for us\n")
    for variant in variants:
        write_variant(root / "build" / variant, f"{factor:07d}", factor, version=version)
    (root / "build/CARD.md").write_text(f"# tiny {version}\n")
    return root


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a session of publications left on a Hub that trusts nobody."""
    trees = tmp_path_factory.mktemp("trees")
    two = write_tree(trees / "two variants", variants=("torch-cpu", "torch-universal"))
    (two / "benchmarks/benchmark_old.py").touch()
    (two / "build/torch-cpu/gone.py").touch()
    (two / "build/torch-cpu/bytecode.pyc").touch()
    write_variant(two / "build/torch-cpu", "0000002", 2)
    write_tree(trees / "one variant", factor=3)
    write_tree(trees / "next version", version=2, factor=5)
    with Hub(trees / "hub") as hub:
        yield run_client(SESSION, [trees], environment(hub.endpoint, trees / "home"))


def variant_files(*variants: str) -> list[str]:
    return [f"build/{variant}/{name}" for variant in variants for name in ("__init__.py", "_ops.py", "metadata.json")]


ALWAYS = [".gitattributes", "benchmarks/benchmark.py"]


def test_each_stage_is_told_before_it_begins(seen):
    assert [what.split()[0] for what in seen["told"]] == ["looking", "uploading", "setting", "describing"]
    uploaded = [path for path in seen["two variants"]["files"] if path != ".gitattributes"]
    assert seen["told"][1].startswith(f"uploading 2 variants, {len(uploaded)} files, ")


def test_a_new_branch_holds_the_variants_and_the_benchmarks_only(seen):
    extra = [*ALWAYS, "benchmarks/benchmark_old.py", "build/torch-cpu/gone.py"]
    assert seen["two variants"]["files"] == sorted([*variant_files("torch-cpu", "torch-universal"), *extra])
    assert seen["two variants"]["variants"] == ["torch-cpu", "torch-universal"]
    assert seen["next version"]["branch"] == "v2"
    assert seen["next version"]["files"] == [*ALWAYS, *variant_files("torch-cpu")]


def test_only_given_variants_of_a_branch_are_replaced(seen):
    assert seen["one variant"]["commit"] != seen["two variants"]["commit"]
    assert seen["one variant"]["files"] == [*ALWAYS, *variant_files("torch-cpu", "torch-universal")]


def test_publishing_again_makes_no_commit(seen):
    assert seen["again"] == seen["two variants"]["commit"]


def test_a_tag_names_the_commit_and_does_not_move(seen):
    assert seen["tag"] == [["1.0", seen["two variants"]["commit"]]]
    assert seen["tag taken"] == ["org/tiny has a tag 1.0, and tags do not move: choose another", True]


def test_the_card_goes_to_main(seen):
    assert seen["main"] == [".gitattributes", "README.md", "build/torch-cuda/stray.py", "stray"]
    assert seen["card"] == "# tiny 2\n"


def test_the_lines_to_load_ask_for_consent_where_it_is_needed(seen):
    trust = 'trust_remote_code=["org/tiny"]'
    commit = seen["two variants"]["commit"]
    assert seen["two variants"]["lines"] == [
        f'kernels.get_kernel("org/tiny", version=1, {trust})',
        f'kernels.get_kernel("org/tiny", revision="{commit}", {trust})',
    ]
    trusted = Published("org/tiny", 1, "v1", commit, ("torch-cpu",), trusted=True)
    assert trusted.load_lines()[0] == 'kernels.get_kernel("org/tiny", version=1)'


NOT_FOUND = httpx2.Response(404, request=httpx2.Request("GET", "http://127.0.0.1"))
FAILURES = [httpx2.ConnectError("gone"), httpx2.ReadTimeout("slow"), HfHubHTTPError("who?", response=NOT_FOUND)]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_hub_that_falls_silent_after_the_upload_is_no_failure(failure):
    def overview(organization):
        raise failure

    assert not is_trusted(SimpleNamespace(get_organization_overview=overview), "org/tiny")


def test_a_changed_file_is_refused(tmp_path):
    tree = write_tree(tmp_path)
    (tree / "build/torch-cpu/_ops.py").write_text("ops = None\n")
    with pytest.raises(ValueError, match=r"torch-cpu: .*_ops\.py"):
        read_release(tree)


def test_another_version_than_that_of_the_tree_is_refused(tmp_path):
    tree = write_tree(tmp_path)
    (tree / "build.toml").write_text(BUILD_TOML.format(version=2))
    with pytest.raises(ValueError, match=r"is of version 1, and build\.toml of 2"):
        read_release(tree)


def provenance(commit: str, dirty: bool) -> dict:
    return {"kernel-builder": {"version": "0"}, "kernel": {"commit": commit, "dirty": dirty}}


def test_variants_of_different_commits_are_no_release(tmp_path):
    tree = write_tree(tmp_path, variants=())
    for name, digit in ("torch-cpu", "a"), ("torch-universal", "b"):
        write_variant(tree / "build" / name, f"{digit}000000", 2, provenance=provenance(digit * 40, dirty=False))
    with pytest.raises(ValueError, match="different commits") as refused:
        read_release(tree)
    named = str(refused.value).splitlines()[-2:]
    assert named == [f"torch-cpu: from commit {'a' * 40}", f"torch-universal: from commit {'b' * 40}"]


DIRTY = provenance("0" * 40, dirty=True)


@pytest.mark.parametrize("unique_id, metadata", [("0000002_dirty", {}), ("0000002", {"provenance": DIRTY})])
def test_a_dirty_build_needs_permission(tmp_path, unique_id, metadata):
    tree = write_tree(tmp_path)
    variant = write_variant(tree / "build/torch-cpu", unique_id, 2, **metadata)
    with pytest.raises(ValueError, match="torch-cpu: is built from uncommitted changes"):
        read_release(tree)
    assert read_release(tree, allow_dirty=True).variants == (variant,)


def test_a_tree_without_a_build_is_refused(tmp_path):
    tree = write_tree(tmp_path, variants=())
    with pytest.raises(BuildError, match="no variant"):
        read_release(tree)
    (tree / "build/CARD.md").unlink()
    with pytest.raises(ValueError, match=r"no CARD\.md: run `python -m tools\.build\.variants` first"):
        read_release(tree)


def test_a_release_needs_a_repository(tmp_path):
    tree = write_tree(tmp_path)
    (tree / "build.toml").write_text('[general]\nname = "tiny"\nversion = 1\n')
    with pytest.raises(ValueError, match="repo-id"):
        read_release(tree)
    assert read_release(tree, repo_id="org/other").repo_id == "org/other"


def test_command_says_what_it_did_and_hides_the_token(tmp_path, repository):
    tree = write_tree(tmp_path / "tree")
    with Hub(tmp_path / "hub", trusted=["org"]) as hub:
        variables = environment(hub.endpoint, tmp_path / "home", HF_TOKEN="hf_secret")
        options = ["--build", tree / "build", "--repo-id", "org/tiny"]
        done = run_tool(repository, "tools.hub.publish", *options, variables=variables)
        assert done.returncode == 0, done.stderr
        again = run_tool(repository, "tools.hub.publish", *options, "--tag", "1.0", variables=variables)
    commit_id = done.stdout.splitlines()[1].removeprefix("commit ")
    assert done.stdout.splitlines() == [
        "Published org/tiny, branch v1",
        f"commit {commit_id}",
        "  torch-cpu",
        "Load it with",
        '  kernels.get_kernel("org/tiny", version=1)',
        f'  kernels.get_kernel("org/tiny", revision="{commit_id}")',
    ]
    assert len(commit_id) == 40 and again.stdout == done.stdout
    assert "hf_secret" not in done.stdout + done.stderr


def test_a_hub_out_of_reach_is_one_line(tmp_path, repository):
    tree = write_tree(tmp_path / "tree")
    with Hub(tmp_path / "hub") as hub:
        variables = environment(hub.endpoint, tmp_path / "home")
    done = run_tool(repository, "tools.hub.publish", "--build", tree / "build", variables=variables)
    assert done.returncode == 1
    assert done.stderr.startswith("tools.hub.publish: ") and "Traceback" not in done.stderr
