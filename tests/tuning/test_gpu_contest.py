"""Contests on a GPU, rehearsed without one: launches are stand-ins on the CPU, and the clock is a table."""

from __future__ import annotations

import math
import weakref

import pytest
import torch

from tests.tuning.conftest import Launch, TableClock

pytest.importorskip("triton")

CPU, HALF = torch.device("cpu"), torch.float16
SIZE = (48, 96)


def clock_of(launch: Launch, seconds: dict[str, float]) -> TableClock:
    """A clock that tells work by the configuration that was launched last; torch's products launch none."""

    def name_of(work) -> str:
        launch.last = "torch"
        work()
        return launch.last if launch.last in seconds else "others"

    return TableClock({"others": 1.0, **seconds}, name_of=name_of)


def measure(kernel, seconds, size=SIZE, count=2):
    task = kernel.tuning.contest.Task(
        kernel.kernels.speeds.measurement_file.Need("symmetric_gemm", "float16", *size), CPU, count
    )
    launch = kernel.kernels.gpu.symmetric_gemm.launch_symmetric_gemm
    return kernel.tuning.tune.Tuner(60.0, clock_of(launch, seconds)).measure(task, 0)


def names(kernel) -> list[str]:
    return ["-".join(map(str, config)) for config in kernel.tuning.candidates.product_configs(CPU, HALF, SIZE)]


@pytest.mark.parametrize("size", [SIZE, (48, 48)], ids=["long", "square"])
def test_the_fastest_right_configuration_is_launched(kernel, gpu, measurements, size):
    last = names(kernel)[-1]
    finding = measure(kernel, {last: 0.5, "torch": 0.75}, size)
    assert finding.entry["gain"] == 1.5 and not finding.failed and "1.50 times as fast as torch's" in finding.summary
    tuned = kernel.kernels.gpu.tuned
    chosen = tuned.chosen_config("a GPU", tuned.Target("cuda", 90), HALF, size, (True, True))
    assert "-".join(map(str, chosen)) == last
    assert kernel.kernels.speeds.gains.gain_of(CPU, HALF, "symmetric_gemm", size, None) == (1.5, "measured here")


@pytest.mark.parametrize("rows, sections", [(48, [1, 3, 5]), (11 * 256, [1])], ids=str)
def test_sections_compete_only_where_squares_are_left_over(kernel, gpu, rows, sections):
    """Whoever names the configurations: a matrix of 11 x 256 rows has 66 squares, one for each pair."""
    need = kernel.kernels.speeds.measurement_file.Need("symmetric_gemm", "float16", rows, 16)
    task, compiled = kernel.tuning.contest.Task(need, CPU, 1), kernel.kernels.gpu.tuned.COMPILED
    for configs in (None, list(compiled)):
        contest = kernel.tuning.gpu_contest.gpu_contest(task, configs)
        counts = [config.sections for config in compiled if "-".join(map(str, config)) in contest.candidates]
        assert counts == sections


def test_a_launch_in_sections_that_ships_defends_its_place_as_one_launch_where_no_squares_are_left_over(
    kernel, gpu, monkeypatch
):
    contests, compiled = kernel.tuning.gpu_contest, kernel.kernels.gpu.tuned.COMPILED
    monkeypatch.setattr(contests, "symmetric_choice", lambda *_: kernel.kernels.speeds.gains.Gain(1.5, "shipped"))
    need = kernel.kernels.speeds.measurement_file.Need("symmetric_gemm", "float16", 11 * 256, 16)
    contest = contests.gpu_contest(kernel.tuning.contest.Task(need, CPU, 1), [compiled[2]])
    assert contest.before == "-".join(map(str, compiled[0]))


TOGETHER = {"symmetric_gemm": 4, "hopper_gemm": 5, "torch.bmm": 3}


@pytest.mark.parametrize("count, longest", [(1, (1, 1, 1)), (6, (3, 3, 3)), (7, (4, 4, 3)), (60, (4, 5, 3))], ids=str)
def test_each_candidate_multiplies_as_many_matrices_as_a_step_gives_it(kernel, gpu, monkeypatch, count, longest):
    """Even pieces of as many squares as fill the GPU with its tiles; with others' there would be empty places."""
    contest, lengths = kernel.tuning.gpu_contest, kernel.kernels.gpu.symmetric_gemm.launch_symmetric_gemm.lengths
    counted = []
    together = lambda _, size, iteration: counted.append(size) or TOGETHER.get(iteration.products.square_name, 2)  # noqa: E731
    commuting = lambda A, B: lengths.setdefault("torch.bmm", set()).update((len(A), len(B)))  # noqa: E731
    monkeypatch.setattr(contest, "matrices_together", together)
    monkeypatch.setattr(contest, "BATCHED", contest.BATCHED._replace(commuting=commuting))

    def candidates(k):
        need = kernel.kernels.speeds.measurement_file.Need("symmetric_gemm", "float16", 48, k)
        return contest.gpu_contest(kernel.tuning.contest.Task(need, CPU, count)).candidates.values()

    for candidate in candidates(48):
        candidate.run()
    assert lengths == dict(zip(TOGETHER, ({each} for each in longest)))
    assert {candidate.count for candidate in candidates(96)} == {min(count, 2)}  # as squares have with today's product
    assert set(counted) == {(48, 48)}


def test_gains_are_those_of_one_matrix(kernel, gpu, monkeypatch):
    """torch's product takes longer, but for six matrices, and our kernel for three."""
    monkeypatch.setattr(kernel.tuning.gpu_contest, "_count", lambda task, name: 6 if name == "torch.bmm" else 3)
    last = names(kernel)[-1]
    entry = measure(kernel, {last: 0.5, "torch": 0.75}).entry
    assert entry["gain"] == pytest.approx(0.75) and (entry["count"], entry["seconds"]) == (3, 0.5)


def test_torchs_products_stay_where_they_are_faster(kernel, gpu):
    finding = measure(kernel, {"torch": 0.5})
    assert finding.entry["gain"] == 0.5 and finding.summary.endswith(": torch's products")


def test_a_tie_leaves_torchs_products(kernel, gpu):
    """What is chosen stays: nothing had been measured."""
    finding = measure(kernel, {})
    assert finding.entry["gain"] < 1 and not kernel.tuning.findings.is_ours(finding)
    assert kernel.tuning.findings.is_ours(finding._replace(entry={**finding.entry, "gain": 1.0}))


def asymmetric(A, B, C):
    C[:, 0, -1] += 1


def overflowing(A, B, C):
    """As partial sums in half precision would: of one dominant row."""
    C[(C.abs() > 4000)] = math.inf


def by_batch(A, B, C):
    if len(A) > 1:
        C *= 1 + 2**-9


def leaking(A, B, C):
    if A.isnan().any():
        C.fill_(math.nan)


def cut_tile(A, B, C):
    if A.size(1) % 16:
        C[:, -1, -1] = 0


def slightly_wrong(A, B, C):
    C *= 1 + 2**-7


@pytest.mark.parametrize("fault", [asymmetric, overflowing, by_batch, leaking, cut_tile, slightly_wrong])
def test_a_wrong_launch_is_found_and_never_taken(kernel, gpu, measurements, fault):
    launch = kernel.kernels.gpu.symmetric_gemm.launch_symmetric_gemm
    first, second, *_ = names(kernel)
    launch.wrong = {second: fault}
    finding = measure(kernel, {second: 0.1, first: 0.5})
    assert list(finding.failed) == [second] and finding.entry["gain"] == 2.0
    assert second in measurements.failed(gpu, "symmetric_gemm", "float16") and second in finding.summary


def test_where_all_launches_are_wrong_torchs_products_stay(kernel, gpu, measurements):
    launch = kernel.kernels.gpu.symmetric_gemm.launch_symmetric_gemm
    launch.wrong = dict.fromkeys(names(kernel), asymmetric)
    finding = measure(kernel, {})
    assert (finding.entry["gain"], finding.entry["count"]) == (0.0, 2) and len(finding.failed) == len(names(kernel))
    assert kernel.kernels.speeds.gains.gain_of(CPU, HALF, "symmetric_gemm", SIZE, None) == (0.0, "measured here")
    safe = kernel.kernels.gpu.tuned.safe_config(kernel.kernels.gpu.tuned.Target("cuda", 90), HALF, SIZE[0], False, True)
    assert kernel.kernels.gpu.tuned.nearest("a GPU", HALF, *SIZE) is None and "-".join(map(str, safe)) in finding.failed


def test_matrices_of_proofs_are_drawn_once_and_let_go(kernel, gpu, monkeypatch):
    """Two for the size that is measured and two for the one where tiles are cut, however many launches are proven."""
    proof, drawn = kernel.tuning.proof, []
    adversarial = proof.adversarial

    def noted(*arguments):
        X = adversarial(*arguments)
        drawn.append(weakref.ref(X))
        return X

    monkeypatch.setattr(proof, "adversarial", noted)
    measure(kernel, {})
    assert len(drawn) == 4 and not any(reference() is not None for reference in drawn)


def test_a_launch_without_resources_is_left_out(kernel, gpu):
    def raising(A, B, C):
        raise RuntimeError("out of resource: shared memory")

    launch, (first, second, *_) = kernel.kernels.gpu.symmetric_gemm.launch_symmetric_gemm, names(kernel)
    launch.wrong = {first: raising}
    finding = measure(kernel, {second: 0.5})
    assert "out of resource" in finding.summary and finding.entry["gain"] == 2.0
    assert first not in finding.failed  # it may have been an accident


def test_a_lost_gpu_is_raised(kernel, gpu):
    def losing(A, B, C):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    launch = kernel.kernels.gpu.symmetric_gemm.launch_symmetric_gemm
    launch.wrong = {names(kernel)[1]: losing}
    with pytest.raises(RuntimeError, match=f"{names(kernel)[1]}.*illegal memory access"):
        measure(kernel, {})
    assert names(kernel)[1] in kernel.kernels.speeds.measurements.failed(gpu, "symmetric_gemm", "float16")


def test_torchs_products_stay_after_they_lost_the_gpu(kernel, gpu, monkeypatch):
    """Nothing could replace them, and without them ours would win every race to come."""

    def losing(X):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    contest = kernel.tuning.gpu_contest
    monkeypatch.setattr(contest, "BATCHED", contest.BATCHED._replace(gram=losing, commuting=losing, gram_affine=losing))
    with pytest.raises(RuntimeError, match=r"torch made .* unusable for this process: start it again \(Runt"):
        measure(kernel, {})
    assert not kernel.kernels.speeds.measurements.failed(gpu, "symmetric_gemm", "float16")


def test_tasks_of_a_gpu_are_those_that_a_plan_asks_for(kernel, monkeypatch):
    tasks_of, cuda = kernel.tuning.contest.tasks_of, torch.device("cuda", 0)
    needs = lambda size, dtype=HALF: [task.need[:1] + task.need[2:] for task in tasks_of(cuda, dtype, size, 3)]  # noqa: E731
    assert needs((512, 2048)) == [("symmetric_gemm", 512, 2048), ("symmetric_gemm", 512, 512)]
    assert needs((512, 512)) == [("symmetric_gemm", 512, 512)]
    assert needs((100, 300)) == [("small_polar", 100, 300)]
    assert needs((500, 2050)) == needs((512, 2050)) == needs((500, 2048)) == []
    assert needs((512, 512), torch.float64) == tasks_of(torch.device("mps"), HALF, (512, 512), 3) == []
    assert {task.count for size in ((512, 2048), (100, 300)) for task in tasks_of(cuda, HALF, size, 3)} == {3}
    monkeypatch.setattr(kernel.tuning.contest, "launches_triton", lambda device: False)
    assert needs((512, 512)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_no_tile_of_32_competes_on_hopper(kernel, gpu, dtype):
    """Its matrix instructions take 64 rows, and steps of 32 columns have twice as many barriers."""
    for m in (16, 768, 1024, 8192):
        configs = kernel.tuning.candidates.product_configs(CPU, dtype, (m, m))
        assert len(configs) > 8 and min(min(config.tile, config.tile_k) for config in configs) >= 64
