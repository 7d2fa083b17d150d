"""tools/hub/publish.py and rollback.py, with the real client, to the Hub of tools/hub."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError

from tests.support.hub_clients import digest_again, environment, run_client, run_tool
from tests.support.release_trees import add_variant, write_tree
from tools.hub.publish import Published, is_trusted
from tools.hub.server import Hub
from tools.pins.verify import pin_of

SESSION = """
import json, sys, unittest.mock
from dataclasses import replace
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi
from tools.hub.publish import publish
from tools.hub.release import read_release
from tools.hub.rollback import roll_back

trees, kind = Path(sys.argv[1]), {"repo_type": "kernel"}
api, seen = HfApi(), {}


def files(revision):
    return sorted(api.list_repo_files("org/tiny", revision=revision, **kind))


def published(tree, **options):
    done = publish(read_release(trees / tree), **options)
    seen[tree] = {**vars(done), "lines": done.load_lines(), "files": files(done.branch)}
    return done


def refusal(call):
    heads = api.list_repo_refs("org/tiny", **kind)
    try:
        call()
    except ValueError as error:
        return [str(error), api.list_repo_refs("org/tiny", **kind) == heads]


def refused(**options):
    return refusal(lambda: publish(read_release(trees / "one variant"), **options))


def refused_back(to, pins=None):
    return refusal(lambda: roll_back(api, "org/tiny", to, pins))


api.create_repo("org/tiny", **kind)
there = [CommitOperationAdd(path, b"") for path in (".gitattributes", "stray", "build/torch-cuda/stray.py")]
api.create_commit("org/tiny", there, commit_message="there before", **kind)
seen["told"] = []
with unittest.mock.patch.object(HfApi, "create_commit", side_effect=ValueError("the line is cut")):
    seen["cut off"] = refused()
seen["broken off"] = refusal(lambda: publish(replace(read_release(trees / "two variants"), card=trees), tag="1.0"))
first = published("two variants", tag="1.0", progress=seen["told"].append)
seen["again"], cuda = publish(read_release(trees / "two variants")).commit, first.variants["torch-cuda"]
seen["unsettled"] = refused(drop=["torch-cude"])
seen["contradicted"] = refused(drop=["torch-cpu", "torch-cuda"], keep={"torch-cuda": cuda, "torch-rocm": None})
seen["not as pinned"] = refused(keep={"torch-cuda": "0" * 64})
seen["tag taken"] = refused(tag="1.0", keep={"torch-cuda": cuda})
seen["tags of branches"] = [refused(tag=tag, keep={"torch-cuda": cuda}) for tag in ("v1", "main")]
second = published("one variant", keep={"torch-cuda": cuda})
seen["tag"] = [(ref.name, ref.target_commit) for ref in api.list_repo_refs("org/tiny", **kind).tags]
seen["dropping"] = refusal(lambda: publish(replace(read_release(trees / "dropped"), card=trees), drop=["torch-cuda"]))
published("dropped", drop=["torch-cuda"])
seen["bad commits"] = [refused_back(to) for to in ("v1", first.commit[:12], seen["dropped"]["commit"])]
seen["not that release's"] = refused_back(first.commit, second.pins)
seen["less than pinned"] = refused_back(first.commit, {**first.pins, "torch-rocm": "0" * 64})
seen["back"] = roll_back(api, "org/tiny", first.commit, first.pins)
seen["files back"] = files("v1")
seen["history"] = [files(done) for done in (first.commit, second.commit, seen["dropped"]["commit"])]
published("next version")
seen["main"] = files("main")
seen["card"] = Path(api.hf_hub_download("org/tiny", "README.md", **kind)).read_text()
print(json.dumps(seen, default=dict))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a session of publications left on a Hub that trusts nobody."""
    trees = tmp_path_factory.mktemp("trees")
    two = write_tree(trees / "two variants", variants=("torch-cpu", "torch-cuda"))
    (two / "benchmarks/benchmark_old.py").touch()
    (two / "build/torch-cpu/gone.py").touch()
    digest_again(two / "build/torch-cpu")
    (two / "build/torch-cpu/__pycache__").mkdir()
    (two / "build/torch-cpu/__pycache__/gone.cpython-311.pyc").touch()
    write_tree(trees / "one variant", factor=3)
    write_tree(trees / "dropped", factor=4)
    write_tree(trees / "next version", version=2, factor=5)
    with Hub(trees / "hub") as hub:
        yield run_client(SESSION, [trees], environment(hub.endpoint, trees / "home"))


def variant_files(*variants: str) -> list[str]:
    return [f"build/{variant}/{name}" for variant in variants for name in ("__init__.py", "_ops.py", "metadata.json")]


ALWAYS = [".gitattributes", "benchmarks/benchmark.py"]


def test_each_stage_is_told_before_it_begins(seen):
    assert [what.split()[0] for what in seen["told"]] == ["looking", "uploading", "describing", "setting"]
    uploaded = [path for path in seen["two variants"]["files"] if path != ".gitattributes"]
    assert seen["told"][1].startswith(f"uploading 2 variants, {len(uploaded)} files, ")


def test_a_new_branch_holds_the_variants_and_the_benchmarks_only(seen):
    extra = [*ALWAYS, "benchmarks/benchmark_old.py", "build/torch-cpu/gone.py"]
    assert seen["two variants"]["files"] == sorted([*variant_files("torch-cpu", "torch-cuda"), *extra])
    assert list(seen["two variants"]["variants"]) == ["torch-cpu", "torch-cuda"]
    assert seen["next version"]["branch"] == "v2"
    assert seen["next version"]["files"] == [*ALWAYS, *variant_files("torch-cpu")]


def test_variants_of_the_branch_that_a_release_lacks_have_to_be_named(seen):
    text, unchanged = seen["unsettled"]
    assert unchanged and "v1 has variants that this release, of commit None, lacks" in text
    assert text.splitlines()[1::2] == ["torch-cude is not on v1, or in this release", "  torch-cuda, of commit None"]
    text, unchanged = seen["contradicted"]
    lines = [f"torch-{name} is not on v1, or in this release" for name in ("cpu", "rocm")]
    assert unchanged and text.splitlines()[1:] == ["torch-cuda is both dropped and kept", *lines]


def test_a_kept_variant_has_to_be_what_its_pin_says(seen):
    (text, unchanged), pins = seen["not as pinned"], seen["two variants"]["variants"]
    assert unchanged and f"has the sha256 {pins['torch-cuda']}" in text


def test_a_release_replaces_its_variants_and_those_that_are_dropped(seen):
    assert seen["one variant"]["commit"] != seen["two variants"]["commit"]
    assert seen["one variant"]["files"] == [*ALWAYS, *variant_files("torch-cpu", "torch-cuda")]
    assert seen["one variant"]["kept"] == {"torch-cuda": seen["two variants"]["variants"]["torch-cuda"]}
    assert seen["dropped"]["files"] == [*ALWAYS, *variant_files("torch-cpu")]


def test_a_rollback_commits_the_variants_that_were_there(seen):
    commit, pins = seen["back"]
    published = [seen[tree] for tree in ("two variants", "one variant", "dropped")]
    assert commit not in [release["commit"] for release in published]
    covered = [path for path in published[0]["files"] if not path.startswith("benchmarks/")]
    assert (seen["files back"], pins) == (covered, published[0]["variants"])
    assert seen["history"] == [release["files"] for release in published]


def test_a_rollback_to_what_is_no_commit_or_not_as_pinned_changes_nothing(seen):
    told, unchanged = zip(*seen["bad commits"])
    assert all(unchanged) and ["no commit" in text for text in told] == [True, True, False]
    assert told[2] == f"{seen['dropped']['commit']} is the head of v1 already"
    text, unchanged = seen["not that release's"]
    assert unchanged and "torch-cpu: metadata.json has the sha256" in text
    lines = [f"{seen['two variants']['commit']} cannot come back:", "torch-rocm has a pin and is not there"]
    assert seen["less than pinned"] == ["\n".join(lines), True]


def test_publishing_again_makes_no_commit(seen):
    assert seen["again"] == seen["two variants"]["commit"]


def test_a_release_that_broke_off_is_published_again_with_its_tag_and_with_what_it_drops(seen):
    assert seen["cut off"][0] == "the line is cut"
    assert "is not a file" in seen["broken off"][0] and "is not a file" in seen["dropping"][0]


def test_a_tag_names_the_commit_and_does_not_move(seen):
    assert seen["tag"] == [["1.0", seen["two variants"]["commit"]]]
    assert seen["tag taken"] == ["org/tiny has a tag 1.0, and tags do not move: choose another", True]
    told = "{} is a branch of org/tiny, which a tag of that name would hide: choose another"
    assert seen["tags of branches"] == [[told.format(tag), True] for tag in ("v1", "main")]


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
    trusted = Published("org/tiny", 1, "v1", commit, {"torch-cpu": "0" * 64}, {}, trusted=True)
    assert trusted.load_lines()[0] == 'kernels.get_kernel("org/tiny", version=1)'


NOT_FOUND = httpx2.Response(404, request=httpx2.Request("GET", "http://127.0.0.1"))
FAILURES = [httpx2.ConnectError("gone"), httpx2.ReadTimeout("slow"), HfHubHTTPError("who?", response=NOT_FOUND)]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_hub_that_falls_silent_after_the_upload_is_no_failure(failure):
    def overview(organization):
        raise failure

    assert not is_trusted(SimpleNamespace(get_organization_overview=overview), "org/tiny")


@pytest.fixture
def tree(tmp_path, repository):
    """A tree with the tools in it, whose commands publish what is beside them."""
    write_tree(tmp_path / "tree")
    shutil.copytree(repository / "tools", tmp_path / "tree/tools", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "tree"


def test_commands_say_what_they_did_write_pins_and_hide_the_token(tree, tmp_path):
    file = tmp_path / "optimizer.pins.json"
    with Hub(tmp_path / "hub", trusted=["org"]) as hub:
        variables = environment(hub.endpoint, tmp_path / "home", HF_TOKEN="hf_secret")

        def command(tool, *options):
            done = run_tool(tree, tool, *options, "--pins", file, variables=variables)
            assert "hf_secret" not in done.stdout + done.stderr
            assert done.returncode == 0, done.stderr
            return done.stdout.splitlines(), json.loads(file.read_text())

        pins = {"torch-cpu": pin_of(tree / "build/torch-cpu")}
        printed, written = command("tools.hub.publish")
        commit_id = written["revision"]
        add_variant(tree / "build/torch-cpu", factor=3)
        newer = command("tools.hub.publish", "--tag", "1.0")[1]["revision"]
        file.write_text(json.dumps(written))
        back, written_back = command("tools.hub.rollback", "--to", commit_id)
    assert printed == [
        "Published org/tiny, branch v1",
        f"commit {commit_id}",
        f"  torch-cpu, pin {pins['torch-cpu']}",
        "Load it with",
        '  kernels.get_kernel("org/tiny", version=1)',
        f'  kernels.get_kernel("org/tiny", revision="{commit_id}")',
    ]
    assert written == {"repo-id": "org/tiny", "revision": commit_id, "variants": pins}
    assert len({commit_id, newer, written_back["revision"]}) == 3 and written_back["variants"] == pins
    assert back == [
        f"org/tiny has the variants of {commit_id} again",
        f"commit {written_back['revision']}",
        f"  torch-cpu, pin {pins['torch-cpu']}",
    ]


def test_a_hub_out_of_reach_is_one_line(tree, tmp_path):
    with Hub(tmp_path / "hub") as hub:
        variables = environment(hub.endpoint, tmp_path / "home")
    done = run_tool(tree, "tools.hub.publish", variables=variables)
    assert done.returncode == 1
    assert done.stderr.startswith("tools.hub.publish: ") and "Traceback" not in done.stderr
