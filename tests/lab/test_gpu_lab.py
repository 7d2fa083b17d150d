"""The lab walks through its whole flow without a GPU, keeps what it finds, and chooses by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import machine
from benchmarks.result_file import LOST, facts
from benchmarks.sweep_bookkeeping import Result
from tests.support.graphs_of_updates import counted_graphs
from tools.lab import measure, step_ways, tune, variant, worker
from tools.lab.configs import read_entries, withdraw, write_entry
from tools.lab.items import STAGES, CutError, FailedError
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
    assert {"How many items of the lab succeeded", "Tuned configurations"} <= {
        line.strip() for line in done.stdout.splitlines()
    }


@pytest.mark.slow
def test_a_dry_run_leaves_package_and_results_alone(dry_run, repository):
    _, out = dry_run
    (tuned,) = (out / "configs").glob("*.json")
    assert not (repository / "torch-ext/optimizer/kernels/speeds/configs" / tuned.name).exists()
    assert not [file for file in out.glob("*.json") if (repository / "benchmarks/results" / file.name).exists()]


def test_records_survive_a_cut_and_other_runs(tmp_path):
    """Those of another identity are put aside, and come back with it."""
    records = Records(tmp_path, {"commit": "a"})
    for status in ("failed", "ok"):
        append(records.file, Record("prove", "key", status, 0.1, value=[1, 2]))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"stage": "prove", "key": "cut o')
    again = Records(tmp_path, {"commit": "a"})
    assert again.done("prove", 0.0) == ["key"] and again.of("prove")["key"].value == [1, 2]
    assert read(tmp_path / FILE) == ({"commit": "a"}, again.all)
    other = Records(tmp_path, {"commit": "b"})
    assert other.put_aside.exists() and not other.all
    append(other.file, Record("prove", "other", "ok", 0.1))
    assert Records(tmp_path, {"commit": "a"}).all == again.all
    assert list(Records(tmp_path, {"commit": "b"}).of("prove")) == ["other"]


def test_the_package_takes_what_the_lab_has_just_written(lab):
    pytest.importorskip("triton")
    name, shipped = machine.device_name(lab.device), lab.kernel.kernels.speeds.measurements.shipped
    assert shipped(name) == ("", {})
    entry = tune.tune_product(lab, torch.float16, (32, 48))
    assert shipped(name)[1]["symmetric_gemm"]["float16"] == [entry]
    assert entry["candidates"] == 3 and entry["other_seconds"] > 0  # two configurations, and torch's product
    assert not list((lab.out / "caches").rglob("*.json"))


def test_a_wrong_candidate_is_not_written_and_withdrawn(lab):
    """It was right in one size, but not in another."""
    pytest.importorskip("triton")
    launch = lab.kernel.kernels.gpu.symmetric_gemm.launch_symmetric_gemm
    launch.wrong = 32
    with pytest.raises(FailedError, match="32-32-8-4-2-1: not symmetric") as failed:
        tune.tune_product(lab, torch.float16, (32, 48))
    assert failed.value.value["tile_k"] == 64
    launch.wrong = 64
    with pytest.raises(FailedError, match="32-64-8-4-2-1: not symmetric") as failed:
        tune.tune_product(lab, torch.float16, (32, 32))
    assert failed.value.value["gain"] == 0.0
    entries = read_entries(lab.configs[0], machine.device_name(lab.device), "symmetric_gemm", "float16")
    assert entries == [failed.value.value]


def test_ways_of_a_step_stand_side_by_side(lab):
    """Launched kernel by kernel, after a warm-up, and captured whole. One that cannot be taken has a mark."""
    with counted_graphs(lab.kernel, "cpu") as graphs:
        rows = step_ways.compare_ways(lab, "gpt2-124m")["results"]
    times = {row["step of"]: row["milliseconds"] for row in rows}
    assert list(times)[:3] == ["optimizer", "optimizer, warmed up", "optimizer, whole step captured"]
    assert all(time > 0 for time in times.values()) and graphs.replays > graphs.captures > 0
    assert step_ways.row_of("a way", None, "needs a GPU") == {
        "step of": "a way", "milliseconds": "needs a GPU", "spread": None,
    }  # fmt: skip
    headings = [heading for heading in rows[0] if heading.startswith("predicted milliseconds")]
    assert len(headings) == 3 and all(row[heading] is None for row in rows for heading in headings)


def test_entry_replaces_only_that_of_its_size(tmp_path):
    header = {"device": "Some GPU", "target": "sm_90"}
    for m, gain in ((256, 1.0), (128, 1.1), (256, 1.2)):
        write_entry([tmp_path], header, "symmetric_gemm", "float16", {"m": m, "k": 256, "gain": gain})
    write_entry([tmp_path], {**header, "date": "later"}, "other", "float16", {"m": 1, "k": 1})
    assert [e["gain"] for e in read_entries(tmp_path, "Some GPU", "symmetric_gemm", "float16")] == [1.1, 1.2]
    content = json.loads((tmp_path / "Some_GPU.json").read_text())
    assert content["date"] == "later" and content["target"] == "sm_90" and content["other"]["float16"]


def test_a_kill_leaves_the_entries_of_before(tmp_path, monkeypatch):
    """Half a file would be read at the start of every later process of the package."""
    header, write = {"device": "Some GPU"}, Path.write_text
    write_entry([tmp_path], header, "symmetric_gemm", "float16", {"m": 128, "k": 256})

    def die(file: Path, text: str) -> None:
        write(file, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", die)
    for change in (
        lambda: write_entry([tmp_path], header, "symmetric_gemm", "float16", {"m": 256, "k": 256}),
        lambda: withdraw([tmp_path], "Some GPU", ("symmetric_gemm", "float16"), lambda entry: True),
    ):
        with pytest.raises(KeyboardInterrupt):
            change()
        assert read_entries(tmp_path, "Some GPU", "symmetric_gemm", "float16") == [{"m": 128, "k": 256}]
        assert list(tmp_path.glob("*.json")) == [tmp_path / "Some_GPU.json"]  # of which the package reads all


def test_sweeps_leave_time_to_those_after_them():
    left, taken = 100.0, []
    for sweep in measure.SWEEPS:
        taken.append(measure.seconds_for(sweep, left) + measure.END_SECONDS)
        left -= taken[-1]
    assert sum(taken) == pytest.approx(100) and all(seconds > 14 for seconds in taken)
    assert [measure.seconds_for(sweep, 1e4) for sweep in measure.SWEEPS] == [
        sweep.limit - measure.END_SECONDS for sweep in measure.SWEEPS
    ]


# What no run would measure.
RESULT = Result("descend_", "tiny, 6", "float32 / float16", 1, 12345.0, *(1.0,) * 4, 1)
MEASURED = {**asdict(RESULT), "status": "measured", "share_of_copy": 1.0, "speed_up": 1.0}


@pytest.fixture
def cut_sweep(lab, monkeypatch):
    """A lab, a sweep, and its results after a run in which it was told to use no time."""
    sweep = measure.SWEEPS[0]
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "TOLD", 0.0)
        with pytest.raises(CutError, match="6 of 6 rows are unmeasured") as cut:
            measure.measure(lab, sweep)
    return lab, sweep, cut.value.value


@pytest.mark.slow
def test_a_sweep_without_time_is_finished_by_the_next_run(cut_sweep):
    """What the first run has measured stays."""
    lab, sweep, content = cut_sweep
    for row in content["results"][2:4]:
        row.update(MEASURED)
    append(lab.out / FILE, Record("measure", "bookkeeping", "cut", 1.0, value=content))
    rows = measure.measure(lab, sweep)["results"]
    assert [row["status"] for row in rows] == ["measured"] * 6
    assert [row["seconds"] == 12345.0 for row in rows] == [False, False, True, True, False, False]


@pytest.mark.parametrize("files, kept", [({}, True), ({"files": "others"}, False)], ids=["same", "others"])
def test_a_killed_sweep_leaves_its_rows_in_its_file(lab, files, kept):
    """The record has only what the run before had measured."""
    sweep, here = measure.SWEEPS[0], facts(lab.kernel, lab.device, {})
    recorded = {**here, "results": [{"case": "a", "status": "measured"}, {"case": "b", "status": "unmeasured"}]}
    left = {**here, **files, "results": [{"case": case, "status": "measured"} for case in "ab"]}
    append(lab.out / FILE, Record("measure", "bookkeeping", "cut", 1.0, value=recorded))
    (lab.out / f"{sweep.program}.json").write_text(json.dumps(left))
    assert measure.earlier_results(lab, sweep) == json.loads(json.dumps(left if kept else recorded))


def test_a_failed_sweep_goes_on_with_its_rows(lab):
    """It measures the others alone, and a peer that has lost the GPU is not launched again."""
    sweep, rows = measure.SWEEPS[0], [{"case": "a", "status": "measured"}, {"case": "b", "status": "error: lost"}]
    failed = {"ended": "status 1", **facts(lab.kernel, lab.device, {}), LOST: {"peer": "lost"}, "results": rows}
    append(lab.out / FILE, Record("measure", "bookkeeping", "failed", 1.0, value=failed))
    item = measure.item_of(lab, sweep)
    findings = worker.note_waiting("measure", [item], lab.out / FILE)
    append(lab.out / FILE, Record("measure", item.key, "failed", 0.0, "running", findings[item.key]))
    assert measure.earlier_results(lab, sweep) == failed


@pytest.mark.slow
def test_rows_of_other_configurations_are_measured_again(cut_sweep):
    lab, sweep, content = cut_sweep
    for row in content["results"]:
        row.update(MEASURED)
    append(lab.out / FILE, Record("measure", "bookkeeping", "cut", 1.0, value={**content, "files": "others"}))
    rows = measure.measure(lab, sweep)["results"]
    assert all(row["status"] == "measured" and row["seconds"] < 12345 for row in rows)


def test_a_sweep_that_time_has_left_out_keeps_its_rows(lab):
    """It fails only if it ends by itself."""
    done = {**facts(lab.kernel, lab.device, {}), "results": [{"case": "a", "status": "measured"}]}
    append(lab.out / FILE, Record("measure", "bookkeeping", "cut", 1.0, value=done))
    with pytest.raises(CutError, match="no time left") as cut:
        measure.measure(replace(lab, until=0.0), measure.SWEEPS[0])
    assert cut.value.value == done
    with pytest.raises(CutError, match="out of time, no results"):
        measure.judged(measure.OUT_OF_TIME, "stopped", lab.out / "none.json")
    with pytest.raises(FailedError, match="status 1, no results; torn"):
        measure.judged("status 1", "torn", lab.out / "none.json")


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
    command = [sys.executable, "-c", BARE, tmp_path / "new"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = Path(done.stdout.strip())
    assert json.loads((made / "metadata.json").read_text())["provenance"]["kernel"]["dirty"]
    assert (made / "kernels/gpu/symmetric_gemm.py").exists() and "torch.ops" in (made / "_ops.py").read_text()
