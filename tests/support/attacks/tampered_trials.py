"""What becomes of every cache that somebody has tampered with, with a pin and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.compiled_variants import MARK, write_compiled_variant
from tests.support.hub_clients import environment, run_client, run_tool, write_variant
from tools.hub.server import Hub
from tools.pins.verify import pin_of

ROOT = Path(__file__).resolve().parents[3]
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


def tampered_caches(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by name, how the load of each tampered cache ended: "today", and "with pin"."""
    variants = [write_compiled_variant(folder / "build"), write_variant(folder / "build/torch-cpu", "0000002", 2)]
    with Hub(folder / "hub", trusted=["org"]) as hub:
        variables = environment(hub.endpoint, folder / "home", **{MARK: str(folder / "mark")})
        commit = run_client(PUBLISH, [folder / "build"], variables)
    pins = json.dumps({variant.name: pin_of(variant) for variant in variants})
    offline = {**variables, "HF_HUB_OFFLINE": "1"}
    done = run_tool(ROOT, "tests.support.attacks.tampered_loads", commit, pins, variables=offline)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
