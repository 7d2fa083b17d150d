"""What a contest on a GPU proves and times, and what becomes of its times; launches are stand-ins on the CPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tests.tuning.test_gpu_contest import CPU, SIZE, measure, names


def task_of(kernel, name="symmetric_gemm", size=SIZE, device=CPU, count=2, dtype="float16"):
    need = kernel.kernels.speeds.measurement_file.Need(name, dtype, *size)
    return kernel.tuning.contest.Task(need, device, count)


@pytest.mark.parametrize("gain, stays", [(None, False), (0.99, False), (1.0, True), (1.5, True)])
@pytest.mark.parametrize("name", ["symmetric_gemm", "small_polar"])
def test_what_is_launched_today_keeps_its_place_in_a_tie(kernel, gpu, monkeypatch, name, gain, stays):
    """By a measurement that ships, or by the model."""
    contests, choice = kernel.tuning.gpu_contest, {"symmetric_gemm": "symmetric_choice", "small_polar": "small_choice"}
    monkeypatch.setattr(contests, choice[name], lambda *_: kernel.kernels.speeds.gains.Gain(gain, "shipped"))
    contest = contests.gpu_contest(task_of(kernel, name))
    torchs, first, *_ = contest.candidates
    assert (torchs, contest.before) == ("torch", first if stays else "torch")


def test_who_stays_within_the_spread_is_chosen(kernel, gpu):
    """A gain below 1 would choose torch's product."""
    contest, timed = kernel.tuning.gpu_contest.gpu_contest(task_of(kernel)), kernel.tuning.race.Timed
    first = names(kernel)[0]
    times = {first: timed(1.02, 0.02), "torch": timed(1.0, 0.02)}
    gains = {winner: contest.entry(winner, times)["gain"] for winner in times}
    assert gains == {first: 1.0, "torch": pytest.approx(1 / 1.02)}


def test_an_entry_is_of_the_chosen_launch_or_else_of_our_fastest(kernel, gpu):
    """If torch's product is chosen, it says how far ours is behind."""
    contest, timed = kernel.tuning.gpu_contest.gpu_contest(task_of(kernel)), kernel.tuning.race.Timed
    first, second, *_ = names(kernel)
    times = {first: timed(1.02, 0.02), second: timed(1.01, 0.03), "torch": timed(0.5, 0.1)}
    for winner, best in ("torch", second), (first, first):
        entry = contest.entry(winner, times)
        assert kernel.kernels.speeds.measurements.candidate_name(entry, "symmetric_gemm") == best
        assert (entry["seconds"] / entry["count"], entry["spread"]) == times[best]


@pytest.mark.parametrize("size", [SIZE, (48, 48)], ids=["long", "square"])
def test_ours_and_torchs_products_are_timed_at_the_same_work(kernel, gpu, monkeypatch, size):
    """X Xᵀ of long matrices; of squares b A + c A², and the product of that with A. Each is rounded once."""
    contests, module, made = kernel.tuning.gpu_contest, kernel.kernels.gpu.symmetric_gemm, {"ours": [], "torch": []}
    launch, drawn = module.launch_symmetric_gemm, contests.drawn

    def symmetric(*operands):
        X = drawn(*operands)
        return X + X.mT if size[0] == size[1] else X

    def launched(A, B, D, C, scalars, config):
        launch(A, B, D, C, scalars, config)
        made["ours"].append(C.clone())

    def noted(product):
        return lambda *operands: made["torch"].append(product(*operands)) or made["torch"][-1]

    table = contests.BATCHED
    products = {name: noted(getattr(table, name)) for name in ("gram", "gram_affine", "commuting")}
    monkeypatch.setattr(contests, "BATCHED", table._replace(**products))
    monkeypatch.setattr(contests, "SCALED", (2.0, -5.0))  # none of the terms is small
    monkeypatch.setattr(contests, "drawn", symmetric)
    monkeypatch.setattr(module, "launch_symmetric_gemm", launched)
    torchs, ours, *_ = contests.gpu_contest(task_of(kernel, size=size)).candidates.values()
    torchs.run()
    ours.run()
    assert len(made["ours"]) == len(made["torch"]) == (1 if size == SIZE else 2)
    for one, other in zip(*made.values()):
        difference = torch.linalg.vector_norm(one.double() - other.double()) / torch.linalg.vector_norm(other.double())
        assert difference < 4 * kernel.kernels.formats.unit_roundoff(torch.float16)


def test_launches_are_on_the_device_of_their_matrices(kernel, gpu, monkeypatch):
    """In proofs and in races: Triton launches on the current one, whatever its arguments are on."""
    contests, module = kernel.tuning.gpu_contest, kernel.kernels.gpu.symmetric_gemm
    assert [contests._current(torch.device(name)).idx for name in ("cuda:1", "cpu")] == [1, -1]
    launch, current, launched_on = module.launch_symmetric_gemm, [], []

    @contextmanager
    def noted(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(contests, "_current", noted)
    note = lambda *_: launched_on.append(tuple(current))  # noqa: E731
    monkeypatch.setattr(module, "launch_symmetric_gemm", lambda *arguments: note() or launch(*arguments))
    monkeypatch.setattr(contests.small_polar, "launch_small_polar", note)
    monkeypatch.setattr(contests, "prove_small", lambda start, *_: start())
    for name in "symmetric_gemm", "small_polar":
        _, ours, *_ = contests.gpu_contest(task_of(kernel, name)).candidates.values()
        for act in ours.prove, ours.run:
            launched_on.clear()
            act()
            assert set(launched_on) == {(CPU,)}


def test_ours_is_chosen_where_torchs_product_fails(kernel, gpu, monkeypatch):
    def failing(*_, **__):
        raise ValueError("not implemented")

    contest = kernel.tuning.gpu_contest
    monkeypatch.setattr(contest, "BATCHED", contest.BATCHED._replace(gram=failing))
    last = names(kernel)[-1]
    finding = measure(kernel, {last: 0.5})
    assert finding.entry["gain"] == 1.0 and f"symmetric_gemm {last};" in finding.summary
    assert "torch is left out: ValueError: not implemented" in finding.summary


def test_what_a_launch_leaves_unwritten_is_no_number(kernel, gpu, monkeypatch):
    """Else it might still hold what another launch has written there. And the races' rows have a norm of about 1."""
    module, unwritten, norms = kernel.kernels.gpu.symmetric_gemm, [], []
    launch = module.launch_symmetric_gemm

    def noted(A, B, D, C, scalars, config):
        unwritten.append(bool(C.isnan().all()))
        norms.append(A.float().norm(dim=2).mean().item())
        launch(A, B, D, C, scalars, config)

    monkeypatch.setattr(module, "launch_symmetric_gemm", noted)
    candidate = kernel.tuning.gpu_contest.gpu_contest(task_of(kernel)).candidates[names(kernel)[0]]
    candidate.prove()
    assert unwritten and all(unwritten)
    norms.clear()
    candidate.run()
    assert norms == [pytest.approx(1.0, abs=0.1)]


SMALL = ("float16", torch.float32, (2, 3)), ("bfloat16", torch.bfloat16, (1, 1, 1, 1, 1))


@pytest.mark.parametrize("dtype, packed, windows", SMALL, ids=str)
def test_small_matrices_are_multiplied_in_one_launch_or_by_separate_products(
    kernel, gpu, monkeypatch, dtype, packed, windows
):
    """Whatever a step does today. All of them, as steps pack them, in as many windows as the iteration has."""
    contests, launched, proven = kernel.tuning.gpu_contest, [], []
    for module in contests, kernel.iteration:
        monkeypatch.setattr(module, "small_choice", lambda *_: kernel.kernels.speeds.gains.Gain(2.0, "shipped"))
    monkeypatch.setattr(contests.small_polar, "launch_small_polar", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(contests, "prove_small", lambda *arguments: proven.append(arguments))
    task, work = task_of(kernel, "small_polar", count=3, dtype=dtype), getattr(torch, dtype)
    torchs, ours, *_ = contests.gpu_contest(task).candidates.values()
    directions, iteration, _ = torchs.run.args
    assert not iteration.in_one_launch and (len(directions), directions.dtype) == (3, packed)
    ours.run()
    ours.prove()
    ((G, C, steps, scaling, config),), ((_, like, size, side, lengths),) = launched, proven
    assert G is directions and (C.shape, C.dtype) == (G.shape, work) and scaling[0] == iteration.scale
    assert (like.dtype, size, side) == (work, SIZE, config.side) and side == 64
    assert lengths == windows and steps == contests.steps_of(iteration.gram_windows)
    assert torchs.count == ours.count == 3 and ours.label.startswith("small_polar 64-")


def test_long_matrices_of_a_chain_are_multiplied_as_they_are_packed(kernel):
    """704 MiB hold eleven of them in float32; 60 come in six pieces."""
    task = task_of(kernel, size=(2048, 8192), device=torch.device("cuda", 0), count=60)
    assert kernel.tuning.gpu_contest._count(task, "symmetric_gemm") == 10
