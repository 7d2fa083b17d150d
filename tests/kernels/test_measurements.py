"""What is kept of measurements: in a file that may be broken or written by several at once, and which of them count."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.inside import plan_of
from tests.support.rank_pool import PRELOADED, REPO_ID, load_kernel

CPU = torch.device("cpu")
KERNEL, DTYPE = "cpu_products", "bfloat16"


@pytest.fixture
def file(kernel):
    return kernel.kernels.speeds.measurement_file


@pytest.fixture
def key(kernel):
    return kernel.kernels.speeds.machine.key_of(CPU)


def entry(m: int, k: int, products: str = "SINGLE") -> dict:
    return {"m": m, "k": k, "products": products}


def table(file, *entries: dict, failed: dict | None = None):
    measured = {file.Need(KERNEL, DTYPE, measurement["m"], measurement["k"]): measurement for measurement in entries}
    return file.Table(measured, {(KERNEL, DTYPE): failed} if failed else {})


def known(measurements, file, key, m: int, k: int, among=None):
    measurement = measurements.measured_here(key, file.Need(KERNEL, DTYPE, m, k), among)
    return None if measurement is None else (measurement.entry["products"], measurement.source)


def test_what_was_kept_is_read_by_the_next_process(measurements, file, key):
    for measured in "NATIVE", "SINGLE":  # the last time counts
        measurements.keep(key, table(file, entry(8, 16, measured)))
    measurements.forget()  # as a new process, which has read nothing
    assert known(measurements, file, key, 8, 16) == ("SINGLE", "measured here")
    assert known(measurements, file, key, 16, 8) is None


def test_a_second_reader_needs_no_file(measurements, file, key):
    measurements.keep(key, table(file, entry(8, 16)))
    file.file_of(key).unlink()
    assert known(measurements, file, key, 8, 16) == ("SINGLE", "measured here")


FOREIGN = {"key": {"device": "another"}, "measured": {}, "failed": {}}


def broken_files(good: str) -> dict[str, str | bytes]:
    wrong_size = good.replace('"m": 8', '"m": -8')
    texts = {"cut off": good[: len(good) // 2], "not json": "{", "not text": b"\xff\xfe\x00", "a list": "[1]"}
    texts |= {"nested": "[" * 100_000, "without failures": good.replace('"failed"', '"other"')}
    texts |= {"measured in a list": good.replace('"measured"', '"measured": [], "other"')}
    return {**texts, "another key": json.dumps(FOREIGN), "a size below 1": wrong_size, "empty": ""}


def test_a_broken_or_foreign_file_is_named_and_replaced(measurements, file, key):
    measurements.keep(key, table(file, entry(8, 16)))
    path = file.file_of(key)
    for why, content in broken_files(path.read_text()).items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        measurements.forget()
        with pytest.warns(RuntimeWarning, match=path.name):
            assert known(measurements, file, key, 8, 16) is None, why
        measurements.keep(key, table(file, entry(24, 32)))
        measurements.forget()
        assert known(measurements, file, key, 24, 32) == ("SINGLE", "measured here"), why


LAUNCHES = {
    "small_polar": {"side": 64, "width": 64, "depth": 64, "warps": 4, "stages": 2, "on_chip": 0},
    "symmetric_gemm": {"tile": 256, "tile_k": 64, "group": 8, "warps": 12, "stages": 4, "sections": 1},
}
WRONG = [
    *(("small_polar", "on_chip", wrong) for wrong in (2, -1, True, 1.0)),
    *(("symmetric_gemm", "sections", wrong) for wrong in (0, True, 1.0)),
    *(("symmetric_gemm", "gain", wrong) for wrong in (float("nan"), float("inf"), -0.5, 2)),
    *(("small_polar", field, wrong) for field, wrong in (("warps", 0), ("side", "64"))),
    *(("small_polar", "untried", wrong) for wrong in ("64", [64])),
]


@pytest.mark.parametrize("name, field, wrong", WRONG)
def test_a_launch_or_gain_that_cannot_be_is_ignored(measurements, file, key, name, field, wrong):
    need, right = file.Need(name, "float16", 60, 256), {"on_chip": 1, "sections": 3, "gain": 0.0, "untried": []}
    entry = {"m": 60, "k": 256, **LAUNCHES[name], "gain": 1.5}
    for changes, is_read in (({field: right.get(field, 8)}, True), ({}, True), ({field: wrong}, False)):
        file.file_of(key).unlink(missing_ok=True)
        assert file.add(key, file.Table({need: {**entry, **changes}}, {})) is None
        if is_read:
            assert need in file.read(key).measured
            continue
        with pytest.warns(RuntimeWarning, match=f"is not a measurement of {name}|what was not tried"):
            assert not file.read(key).measured


@pytest.mark.parametrize("field", ["device", "threads", "driver", "torch", "triton", "kernels"])
def test_every_part_of_a_key_counts(measurements, file, key, field):
    measurements.keep(key, table(file, entry(8, 16)))
    measurements.forget()
    other = key._replace(**{field: 77 if field == "threads" else "another"})
    assert file.file_of(other) != file.file_of(key)
    file.file_of(key).rename(file.file_of(other))
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert known(measurements, file, other, 8, 16) is None


def test_threads_and_instructions_are_in_a_processors_key(kernel, one_thread):
    machine = kernel.kernels.speeds.machine
    assert machine.key_of(CPU).threads == 1
    torch.set_num_threads(2)
    assert machine.key_of(CPU).threads == 2
    torch.set_num_threads(1)
    both = map(kernel.kernels.native.gemm_instructions, (torch.bfloat16, torch.float32))
    assert machine.key_of(CPU).device.endswith(", ".join(both))


def test_limits_on_torchs_instructions_are_in_a_processors_key(kernel, monkeypatch):
    """They decide how fast torch's products are, against which ours are timed."""
    processor = kernel.kernels.speeds.machine.processor.__wrapped__
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert ", torch DEFAULT, " in processor()


def test_the_kind_of_an_arm_processor_is_in_its_key(kernel, monkeypatch, tmp_path):
    """Linux knows no name of it; this is a Neoverse N1."""
    lines = "processor\t: 0", "CPU implementer\t: 0x41", "CPU variant\t: 0x3", "CPU part\t: 0xd0c"
    machine, facts = kernel.kernels.speeds.machine, tmp_path / "cpuinfo"
    facts.write_text("\n".join(lines))
    monkeypatch.setattr(machine, "_CPU_FACTS", facts)
    assert "(implementer 0x41, part 0xd0c, variant 0x3), torch " in machine.processor.__wrapped__()


def write_some(variants: str, cache: str, first: int, count: int, together) -> None:
    os.environ.update(LOCAL_KERNELS=f"{REPO_ID}={variants}", XDG_CACHE_HOME=cache)  # the fork server has older ones
    kernel = load_kernel(Path(variants))
    together.wait()
    for i in range(first, first + count):
        kernel.kernels.speeds.measurements.keep(
            kernel.kernels.speeds.machine.key_of(CPU), table(kernel.kernels.speeds.measurement_file, entry(i, i))
        )


def test_two_processes_lose_nothing_of_each_others(kernel, measurements, file):
    """Each adds to what the other has written since it looked last."""
    count, context = 60, multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    folders, together = (str(Path(kernel.__file__).parents[1]), os.environ["XDG_CACHE_HOME"]), context.Barrier(2)
    writers = [context.Process(target=write_some, args=(*folders, 1 + i * count, count, together)) for i in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (path,) = Path(os.environ["XDG_CACHE_HOME"]).glob("optimizer/*")  # no lock, and nothing half written
    sizes = [measurement["m"] for measurement in json.loads(path.read_text())["measured"][KERNEL][DTYPE]]
    assert [writer.exitcode for writer in writers] == [0, 0] and sizes == list(range(1, 2 * count + 1))


def test_without_a_place_for_files_the_process_remembers(measurements, file, key, monkeypatch, tmp_path):
    """A folder below a file cannot be made, whoever asks; said once."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="this process only") as told:
        measurements.keep(key, table(file, entry(8, 16)))
        measurements.keep(key, table(file, entry(16, 16)))
    assert len(told) == 1 and known(measurements, file, key, 8, 16) == ("SINGLE", "measured here")


def test_the_cache_folder_is_that_of_the_convention(file, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for named, expected in ((None, tmp_path / ".cache"), ("relative", tmp_path / ".cache"), ("/else", Path("/else"))):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if named:
            monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert file.cache_folder() == expected / "optimizer"


def test_a_file_lies_in_the_folder_whatever_a_device_is_called(file, key):
    assert file.file_of(key._replace(device="AMD Instinct MI250X / MI250")).parent == file.cache_folder()


def test_nothing_is_read_at_import(kernel, tmp_path):
    variants = str(Path(kernel.__file__).parents[1])
    program = (
        "import sys; from pathlib import Path; from tests.support.rank_pool import load_kernel;"
        f"kernel = load_kernel(Path({variants!r}));"
        "sys.exit(len(kernel.kernels.speeds.measurements._STATE.tables))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", program], env=environment, cwd=root).returncode == 0


def test_a_measured_size_is_chosen_and_explained(kernel, measurements, file, key):
    select, bfloat16 = kernel.kernels.products.select_products, torch.bfloat16
    for name in ("SINGLE", "NATIVE", "NATIVE_SYMMETRIC"):
        measurements.keep(key, table(file, entry(24, 40, name)))
        chosen = select(CPU, bfloat16, 24, 40)
        named = kernel.kernels.products.cpu_tables(bfloat16)[name].name
        assert (chosen.name, chosen.source) == (named, "measured here")
        assert select(CPU, bfloat16, 24, 48).source == "by default"
    optimizer = kernel.Muon([("w", torch.nn.Parameter(torch.ones(24, 40)))], ns_dtype=bfloat16)
    assert optimizer.explain().rows[0].kernel.endswith("bfloat16, measured here")


def test_a_plan_is_made_anew_when_choices_change(kernel, measurements, file, key):
    p = torch.nn.Parameter(torch.ones(24, 40))
    optimizer = kernel.Muon([("w", p)], ns_dtype=torch.bfloat16)
    kernels = []
    for name in ("NATIVE", "SINGLE", "NATIVE"):
        measurements.keep(key, table(file, entry(24, 40, name)))
        p.grad = torch.ones_like(p)
        optimizer.step()
        kernels.append(plan_of(optimizer).batches[0].iteration.products.name)
    tables = kernel.kernels.products.cpu_tables(torch.bfloat16)
    assert kernels == [tables[name].name for name in ("NATIVE", "SINGLE", "NATIVE")]


def test_what_failed_here_is_taken_from_nowhere(kernel, measurements, file, monkeypatch):
    """Neither from this machine's file nor from shipped ones: the next best of those is."""
    config = {"tile": 128, "tile_k": 64, "group": 8, "warps": 8, "stages": 3, "sections": 1}
    other = {**config, "stages": 4}
    entries = [{"m": 64, "k": 64, **config, "gain": 1.5}, {"m": 640, "k": 640, **other, "gain": 1.2}]
    monkeypatch.setattr(measurements, "shipped", lambda name: ("a GPU", {"symmetric_gemm": {"float16": entries}}))
    tuned, gpu = kernel.kernels.gpu.tuned, kernel.kernels.speeds.machine.gpu_key("a GPU")
    nearest = lambda: tuned.nearest("a GPU", torch.float16, 64, 64)  # noqa: E731
    assert nearest() is entries[0]
    measurements.keep(
        gpu, file.Table({file.Need("symmetric_gemm", "float16", 64, 64): {**entries[0], "gain": 1.7}}, {})
    )
    assert nearest()["gain"] == 1.7
    for name in ("128-64-8-8-3-1", "128-64-8-8-5-1"):  # each is added to those before it
        measurements.keep(gpu, file.Table({}, {("symmetric_gemm", "float16"): {name: "not symmetric"}}))
    assert nearest() is entries[1]
    measurements.forget()
    assert nearest() is entries[1]  # by its file


def test_launched_fields_are_those_of_configurations(kernel, file):
    tuned = kernel.kernels.gpu.tuned
    assert file.LAUNCHED["symmetric_gemm"] == tuned.Config._fields
    assert file.LAUNCHED["small_polar"] == tuned.SmallConfig._fields
