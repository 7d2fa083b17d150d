"""The lab walks through its whole flow without a GPU, keeps what it finds, and chooses by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools.lab import measure, racing, variant
from tools.lab.candidates import Launch
from tools.lab.configs import read_entries, write_entry
from tools.lab.items import STAGES
from tools.lab.records import FILE, Record, Records, append, read


@pytest.fixture(scope="module")
def dry_run(repository, variant, tmp_path_factory):
    """What the lab prints and leaves where there is no GPU."""
    out = tmp_path_factory.mktemp("lab")
    command = [sys.executable, "-m", "tools.lab", "--build", variant.parent, "--out", out]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=400)
    return done, out


@pytest.mark.slow
def test_without_a_gpu_the_whole_flow_is_walked_through(dry_run):
    done, out = dry_run
    assert done.returncode == 0, done.stdout + done.stderr + (out / "lab.log").read_text()[-4000:]
    assert done.stdout.startswith("gpu-lab: there is no GPU here")
    (report,) = (json.loads(file.read_text()) for file in out.glob("*.json"))
    assert list(report["stages"]) == list(STAGES) and report["lab"]["commit"]
    statuses = {record["status"] for records in report["stages"].values() for record in records}
    assert statuses <= {"ok", "skipped"}
    assert {"Verdicts", "Tuned configurations"} <= {line.strip() for line in done.stdout.splitlines()}


@pytest.mark.slow
def test_a_dry_run_leaves_package_and_results_alone(dry_run, repository):
    _, out = dry_run
    (tuned,) = (out / "configs").glob("*.json")
    assert not (repository / "torch-ext/optimizer/kernels/configs" / tuned.name).exists()
    assert not [file for file in out.glob("*.json") if (repository / "benchmarks/results" / file.name).exists()]


def test_records_survive_a_cut_and_are_put_aside_by_another_run(tmp_path):
    records = Records(tmp_path, {"commit": "a"})
    for status in ("failed", "ok"):
        append(records.file, Record("prove", "key", status, 0.1, value=[1, 2]))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"stage": "prove", "key": "cut o')
    again = Records(tmp_path, {"commit": "a"})
    assert again.done("prove", 0.0) == ["key"] and again.of("prove")["key"].value == [1, 2]
    assert read(tmp_path / FILE) == ({"commit": "a"}, again.all)
    other = Records(tmp_path, {"commit": "b"})
    assert other.put_aside and not other.all and (tmp_path / "records.old.jsonl").exists()


def test_a_wrong_candidate_is_not_chosen_however_fast():
    launches = [Launch("symmetric_gemm", torch.float16, (name,)) for name in ("safe", "wrong", "right")]
    waits = {"safe": 0.003, "wrong": 0.001, "right": 0.002}

    def calls(launch):
        return [lambda: time.sleep(waits[launch.config[0]])]

    found = racing.find_fastest(
        launches, launches[0], calls, lambda launch: "bad" * ("wrong" in launch.config), tiny=True
    )
    assert found.winner.launch == launches[2] and list(found.wrong) == [launches[1].key]


@pytest.mark.parametrize(
    "old, new, winner",
    [(1.00, 0.99, "old"), (1.00, 0.97, "new"), (0.99, 1.00, "old")],
    ids=["within the noise", "beyond the noise", "old is faster"],
)
def test_a_configuration_is_changed_only_by_more_than_the_noise(old, new, winner):
    final = [racing.Timed("old", old, 0.01), racing.Timed("new", new, 0.01), racing.Timed("slow", 2.0, 0.01)]
    chosen, runner_up = racing.decide(final, "old")
    assert (chosen.launch, runner_up.launch) == (winner, {"old": "new", "new": "old"}[winner])


def test_entry_replaces_only_that_of_its_size(tmp_path):
    header = {"device": "Some GPU", "target": "sm_90"}
    for m, gain in ((256, 1.0), (128, 1.1), (256, 1.2)):
        write_entry([tmp_path], header, "symmetric_gemm", "float16", {"m": m, "k": 256, "gain": gain})
    write_entry([tmp_path], {**header, "date": "later"}, "other", "float16", {"m": 1, "k": 1})
    assert [e["gain"] for e in read_entries(tmp_path, "Some GPU", "symmetric_gemm", "float16")] == [1.1, 1.2]
    content = json.loads((tmp_path / "Some_GPU.json").read_text())
    assert content["date"] == "later" and content["target"] == "sm_90" and content["other"]["float16"]


def test_sweeps_leave_time_to_those_after_them():
    left, taken = 100.0, []
    for sweep in measure.SWEEPS:
        taken.append(measure.seconds_for(sweep, left) + measure.END_SECONDS)
        left -= taken[-1]
    assert sum(taken) == pytest.approx(100) and all(seconds > 15 for seconds in taken)
    assert [measure.seconds_for(sweep, 1e4) for sweep in measure.SWEEPS] == [
        sweep.limit - measure.END_SECONDS for sweep in measure.SWEEPS
    ]


def test_python_files_of_the_tree_make_a_build_dirty(tmp_path, repository):
    package = repository / "torch-ext/optimizer"
    (tmp_path / "kernels").mkdir()
    (tmp_path / "_ops.py").write_text("of the build")
    (tmp_path / "gone.py").touch()
    assert variant.overlay(tmp_path) and not variant.overlay(tmp_path)
    assert (tmp_path / "muon.py").read_bytes() == (package / "muon.py").read_bytes()
    assert (tmp_path / "_ops.py").read_text() == "of the build" and not (tmp_path / "gone.py").exists()


BARE = """
import sys
from pathlib import Path
sys.modules["kernels"] = None
from tools.lab import variant
def compile_library(job):
    job.work.mkdir(parents=True)
    (job.work / "x.so").touch()
    return job.work / "x.so"
variant.compile_library = compile_library
print(variant.build_here(Path(sys.argv[1]), "cpu"))
"""


def test_a_variant_is_built_without_the_hubs_package(tmp_path, repository):
    done = subprocess.run(
        [sys.executable, "-c", BARE, tmp_path / "new"], cwd=repository, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = Path(done.stdout.strip())
    assert json.loads((made / "metadata.json").read_text())["provenance"]["kernel"]["dirty"]
    assert (made / "kernels/symmetric_gemm.py").exists() and "torch.ops" in (made / "_ops.py").read_text()
