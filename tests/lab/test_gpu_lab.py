"""The lab walks through its whole flow without a GPU, and lives through what may happen to a stage on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.hub_clients import write_variant
from tools.lab import measure, racing, variant
from tools.lab.candidates import Launch
from tools.lab.configs import read_entries, write_entry
from tools.lab.items import STAGES
from tools.lab.prove import prove
from tools.lab.records import FILE, Record, Records, append, read
from tools.lab.runner import Stage, run_stage

STAGE = """
import os, time
from pathlib import Path
from tools.lab.items import FailedError, Item

def stop():
    raise FailedError("two and two are five", {"sum": 5})

def items(lab):
    again = (lab.out / "again").exists()
    yield Item("right", lambda: {"answer": 4})
    yield Item("wrong", stop)
    yield Item("broken", lambda: {}["nothing"])
    yield Item("hung", lambda: again or time.sleep(600), limit=60 if again else 0.5)
    yield Item("dead", lambda: again or os._exit(7))
    yield Item("last", lambda: {"runs": len((lab.out / "runs").open("a+").write("x") * "x")})
"""


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


def stage(out: Path, seconds: float) -> Stage:
    """The toy stage, over a toy kernel that loads at once."""
    out.mkdir(exist_ok=True)
    (out / "toy_stage.py").write_text(STAGE)
    write_variant(out / "variants/torch-cpu", "0000007", factor=2)
    order = {"variants": str(out / "variants"), "device": "cpu", "out": str(out), "configs": [], "tiny": False}
    return Stage("toy", "toy_stage", order, time.monotonic() + seconds, out / "lab.log")


@pytest.fixture
def toy_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_broken_item_is_recorded_and_the_rest_goes_on(toy_path):
    records = Records(toy_path, {"device": "toy"})
    assert run_stage(stage(toy_path, 120), records)
    found = records.of("toy")
    assert {key: found[key].status for key in ("right", "last")} == {"right": "ok", "last": "ok"}
    problems = {key: record.problem for key, record in found.items() if record.status == "failed"}
    assert problems.pop("wrong") == "two and two are five" and problems.pop("broken").startswith("KeyError")
    assert problems.pop("hung") == problems.pop("dead").replace("60", "0.5")
    assert not problems and found["right"].value == {"answer": 4} and found["wrong"].value == {"sum": 5}

    (toy_path / "again").touch()
    resumed = Records(toy_path, {"device": "toy"})
    assert run_stage(stage(toy_path, 120), resumed)
    assert {key for key, record in resumed.of("toy").items() if record.status == "failed"} == {"wrong", "broken"}
    assert (toy_path / "runs").read_text() == "x"


@pytest.mark.slow
def test_a_stage_ends_with_its_time(toy_path, capsys):
    records = Records(toy_path, {"device": "toy"})
    toy = stage(toy_path, 8.0)
    (toy_path / "toy_stage.py").write_text(STAGE.replace("limit=0.5", "limit=600"))
    began = time.monotonic()
    assert not run_stage(toy, records)
    assert time.monotonic() - began < 12 and "its time is over" in capsys.readouterr().out
    assert "last" not in records.of("toy")


@pytest.mark.slow
def test_a_stage_that_cannot_start_says_why(toy_path):
    records = Records(toy_path, {"device": "toy"})
    toy = stage(toy_path, 60.0)
    (toy_path / "toy_stage.py").write_text("raise ValueError('not today')")
    assert not run_stage(toy, records)
    assert records.of("toy")["start"].problem.endswith("status 1: ValueError: not today")


TESTS = """
import os, time
from pathlib import Path

AGAIN = Path(__file__).with_name("again")

def test_right(): pass
def test_wrong(): assert 2 + 2 == 5
def test_hung(): AGAIN.exists() or time.sleep(600)
def test_dead(): AGAIN.exists() or os._exit(7)
def test_lost():
    if not AGAIN.exists():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_last():
    with Path(__file__).with_name("runs").open("a") as runs:
        runs.write("x")
"""


@pytest.mark.slow
def test_a_broken_test_is_recorded_and_the_rest_goes_on(tmp_path):
    records = Records(tmp_path, {"device": "toy"})
    file = tmp_path / "test_toy.py"
    file.write_text(TESTS)

    def statuses() -> dict[str, str]:
        toy = stage(tmp_path, 120)
        assert prove(toy, records, (str(file), f"--rootdir={tmp_path}"), limit=3), toy.log.read_text()
        return {key.rpartition("_")[2]: record.status for key, record in records.of("prove").items()}

    assert statuses() == {
        **dict.fromkeys(("wrong", "hung", "dead", "lost"), "failed"),
        "right": "ok",
        "last": "ok",
        "pytest": "ok",
    }
    assert all(
        "crashed" in record.problem for key, record in records.of("prove").items() if key.endswith(("dead", "lost"))
    )
    (tmp_path / "again").touch()
    assert {key for key, status in statuses().items() if status == "failed"} == {"wrong"}
    assert (tmp_path / "runs").read_text() == "x"


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
