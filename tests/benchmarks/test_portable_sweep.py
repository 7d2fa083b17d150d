"""The sweep of portable operations measures both sides of each ratio in one run, as `python -m` starts it."""

import json
import subprocess
import sys


def test_each_ratio_is_of_two_times_of_one_run(repository, variant, tmp_path):
    file = tmp_path / "portable.json"
    places = ["--build", variant.parent, "--output", file]
    subprocess.run([sys.executable, "-m", "benchmarks.sweep_portable", "--tiny", *places], cwd=repository, check=True)
    content = json.loads(file.read_text())
    assert content["commit"] and content["device"] and content["threads"] >= 1
    assert {row["operation"] for row in content["results"]} == {"momentum_pack_", "descend_"}
    for row in content["results"]:
        assert row["status"] == "measured" and row["spread"] >= 0 and row["portable_spread"] >= 0
        assert row["ratio"] == row["portable_seconds"] / row["seconds"] > 0
