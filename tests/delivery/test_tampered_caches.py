"""Of the caches that somebody has tampered with none is loaded by who verifies with a pin; many are by who does not."""

from __future__ import annotations

import json

import pytest

from tests.support.compiled_variants import MARK, write_compiled_variant
from tests.support.hub_clients import environment, run_client, run_tool, write_variant
from tests.support.tampered_caches import CACHES, DELETED, TODAY
from tools.hub.server import Hub
from tools.pins.verify import pin_of

PUBLISH = """
import json, sys
from huggingface_hub import HfApi, snapshot_download
api, kind = HfApi(), {"repo_id": "org/tiny", "repo_type": "kernel"}
api.create_repo(**kind)
api.create_branch(branch="v1", **kind)
commit = api.upload_folder(folder_path=sys.argv[1], path_in_repo="build", revision="v1", **kind).oid
snapshot_download(revision=commit, **kind)
print(json.dumps(commit))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory, repository):
    """What became of every cache, by its name."""
    folder = tmp_path_factory.mktemp("tampered")
    variants = [write_compiled_variant(folder / "build"), write_variant(folder / "build/torch-cpu", "0000002", 2)]
    with Hub(folder / "hub", trusted=["org"]) as hub:
        variables = environment(hub.endpoint, folder / "home", **{MARK: str(folder / "mark")})
        commit = run_client(PUBLISH, [folder / "build"], variables)
    pins = json.dumps({variant.name: pin_of(variant) for variant in variants})
    offline = {**variables, "HF_HUB_OFFLINE": "1"}
    done = run_tool(repository, "tests.support.tampered_loads", commit, pins, variables=offline)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_untouched_cache_loads_and_does_so_again(seen):
    honest = {"end": "loads", "result": 2.0, "foreign": False}
    assert [seen[name]["with pin"] for name in ("untouched", "started again")] == [honest, honest]
    assert seen["untouched"]["bytecode before"] == 0 < seen["started again"]["bytecode before"]


@pytest.mark.parametrize("name", [name for name, tamper in CACHES])
def test_with_a_pin_no_tampered_cache_is_loaded(seen, name):
    done = seen[name]["with pin"]
    assert not done["foreign"]
    if name in [name for name, today, tamper in DELETED]:
        assert (done["end"], done["result"]) == ("loads", 2.0)
    else:
        assert done["end"] == "refused", done


@pytest.mark.parametrize("name", [name for name, tamper in CACHES])
def test_the_table_says_what_happens_without_one(seen, name):
    done = seen[name]["today"]
    assert ("foreign" if done["foreign"] else done["end"]) == TODAY[name], done
