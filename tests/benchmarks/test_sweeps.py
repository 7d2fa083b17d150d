"""The sweeps against peers run, their formulas are right, and an early end loses nothing."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import shapes, sweep_orthogonalize, sweep_plan, sweep_step, timing
from benchmarks.built_kernel import load_built
from benchmarks.busy import busy_cores
from benchmarks.exact_polynomial import errors, exact_factor
from benchmarks.result_file import NEEDS_GPU, UNMEASURED, ResultFile
from benchmarks.step_costs import PIECES, host_milliseconds, replaced
from benchmarks.timing import quartiles, ratios
from tests.support.spectra import composed
from tests.support.tiny_sweeps import run_sweep


@pytest.fixture(scope="module")
def orthogonalize(variant, tmp_path_factory):
    file = tmp_path_factory.mktemp("results") / "orthogonalize.json"
    return run_sweep(sweep_orthogonalize.main, variant, file, "--beside-busy")


@pytest.fixture(scope="module")
def step(variant, tmp_path_factory):
    file = tmp_path_factory.mktemp("results") / "step.json"
    return run_sweep(sweep_step.main, variant, file, "--beside-busy")


def check_contestants(row: dict, present: set[str], absent: set[str]):
    """Those that ran have times and ratios in order, ours is 1, and the others say why they have none."""
    contestants = row["contestants"]
    assert present <= {name for name, outcome in contestants.items() if isinstance(outcome, dict)}
    assert absent <= set(contestants) and all(contestants.values())
    for outcome in (outcome for outcome in contestants.values() if isinstance(outcome, dict)):
        assert 0 < outcome["milliseconds"][0] and outcome["milliseconds"] == sorted(outcome["milliseconds"])
        assert 0 < outcome["ratio"][0] and outcome["ratio"] == sorted(outcome["ratio"])
    assert contestants["optimizer"]["ratio"] == [1, 1, 1]


def test_busy_cores_are_as_many_as_there_are_and_end():
    with busy_cores() as processes:
        assert len(processes) == len(os.sched_getaffinity(0))
        assert all(Path(f"/proc/{process}/stat").exists() for process in processes)
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_orthogonalize_sweep_has_its_columns(orthogonalize):
    cases = [row["case"] for row in orthogonalize["results"]]
    assert cases[len(cases) // 2 :] == [f"{case} beside busy cores" for case in cases[: len(cases) // 2]]
    for row in orthogonalize["results"]:
        present = {"optimizer", "torch products", "torch.optim.Muon"}
        check_contestants(row, present, {"torch.compile", "pytorch-optimizer", "gram-newton-schulz"})
        assert row["contestants"]["optimizer, replayed"] == NEEDS_GPU
        assert row["contestants"]["torch.compile"] == UNMEASURED  # it takes seconds for every shape
        assert row["share_of_ideal"] == pytest.approx(row["ideal_milliseconds"] / row["milliseconds"])
        assert row["ideal_milliseconds"] == pytest.approx(1e3 * row["flop"] / row["dense_rate"])
        assert row["flop"] <= row["dense_flop"] and row["bytes"] > 0 and row["method"]
    assert orthogonalize["commit"] and orthogonalize["input_dtype"] == "float32" and "timm" in orthogonalize["peers"]


def test_step_sweep_has_its_columns(step):
    row, busy = step["results"]
    assert (row["case"], busy["case"]) == ("tiny", "tiny beside busy cores") and busy["milliseconds"] > 0
    check_contestants(row, {"optimizer", "torch.optim.Muon", "AdamW"}, {"timm", "pytorch-optimizer", "muon-optimizer"})
    assert row["contestants"]["AdamW"]["error"] == "-" and row["contestants"]["optimizer, warmed up"] == NEEDS_GPU
    for outcome in (outcome for outcome in row["contestants"].values() if isinstance(outcome, dict)):
        assert outcome["peak_bytes"] >= 0 and "kernels" in outcome
    pieces = row["breakdown"]
    assert pieces["whole"] == pytest.approx(sum(pieces[piece] for piece in (*PIECES, "rest")))
    # Each piece was found in the kernel, and none was counted twice.
    assert all(pieces[piece] > 0 for piece in ("momentum_pack", "normalise", "descend", "adamw"))
    assert (pieces["gram"] > 0) == (pieces["affine"] > 0) != (pieces["newton_schulz"] > 0)
    assert pieces["rest"] > 0 and row["host_milliseconds_per_100_matrices"] > 0


def test_the_sweep_of_the_plan_has_its_columns(variant, tmp_path):
    content = run_sweep(sweep_plan.main, variant, tmp_path / "plan.json")
    (row,) = content["results"]
    assert 0 < row["seconds"] and 0 <= row["megabytes"] and row["target_seconds"] == 2.0
    assert content["commit"] and content["device"]


def test_sweep_errors_are_within_bfloat16_rounding(orthogonalize, step):
    """Every product rounds once, fifteen in all; another schedule or multiplier would be off by a tenth and more."""
    for row in orthogonalize["results"] + step["results"]:
        for name in ("optimizer", "torch.optim.Muon"):
            assert 0 < row["contestants"][name]["error"] < 15 * torch.finfo(torch.bfloat16).eps / 2


def test_zero_minutes_leave_every_row_unmeasured(variant, tmp_path):
    results = run_sweep(sweep_step.main, variant, tmp_path / "step.json", "--minutes", "0")["results"]
    assert results and all(row["status"] == UNMEASURED for row in results)


def test_result_file_resumes_where_it_ended(tmp_path):
    """A file of another commit raises."""
    file, facts = tmp_path / "results.json", {"commit": "a", "sides": (1, 2)}
    ResultFile(file, facts, ["first", "second"]).put("first", {"milliseconds": 1.0})
    again = ResultFile(file, facts, ["first", "second"])
    assert again.is_measured("first") and not again.is_measured("second")
    rows = {row["case"]: row for row in json.loads(file.read_text())["results"]}
    assert rows["first"]["milliseconds"] == 1.0 and rows["second"]["status"] == UNMEASURED
    with pytest.raises(ValueError, match="commit"):
        ResultFile(file, {**facts, "commit": "b"}, ["first", "second"])


def test_ratios_compare_times_of_the_same_round():
    assert ratios([2, 30, 8], [1, 10, 2]) == (2.5, 3, 3.5)
    assert quartiles([7]) == (7, 7, 7)


def test_timings_on_a_gpu_last_a_burst(monkeypatch):
    """Seconds are of one call: here 3 ms and 50 ms, on a clock that works set forward; 7 of the first last 20 ms."""
    clock, rounds = [0.0], []

    def took(seconds):
        clock[0] += seconds

    def seconds_of(work, device):
        began = clock[0]
        work()
        rounds.append(clock[0] - began)
        return rounds[-1]

    monkeypatch.setattr(timing, "seconds_of", seconds_of)
    works = [lambda: took(0.003), lambda: took(0.05)]
    timings = timing.take_turns(works, torch.device("cuda"), 5)
    assert [seconds for seconds, _ in timings] == pytest.approx([0.003, 0.05])
    assert min(rounds[2:]) == pytest.approx(0.021) and max(rounds[2:]) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "model, elements, matrices",
    [
        ("gpt2-124m", 124_439_808, 48),
        ("vit-s", 22_050_664, 48),
        ("resnet-50", 25_557_032, 53),
        ("llama-1b", 1_235_814_400, 112),
        ("llama-8b", 8_030_261_248, 224),
        ("llama-70b", 70_553_706_496, 560),
    ],
)
def test_models_have_their_published_parameter_counts(model, elements, matrices):
    assert sum(p.elements for p in shapes.MODELS[model]) == elements
    assert sum(shapes.matrix_counts(shapes.MODELS[model]).values()) == matrices


def test_mixture_has_64_experts_per_layer():
    counts = shapes.matrix_counts(shapes.MODELS["moe-64"])
    assert counts[512, 1280] == 2 * counts[1280, 512] == 2 * 4 * 64


@pytest.fixture(scope="module")
def built(variant):
    """The kernel as the sweeps load it."""
    return load_built(variant.parent)[0]


@pytest.mark.parametrize("rows, cols", [(12, 20), (20, 12)])
def test_exact_factor_applies_polynomial_to_singular_values(rows, cols):
    G = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    U, sigma, Vh = torch.linalg.svd(G, full_matrices=False)
    x, schedule = sigma / sigma.norm(), ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
    exact = exact_factor(G, schedule)
    torch.testing.assert_close(exact, U @ composed(schedule, x).diag() @ Vh, rtol=0, atol=1e-12)
    assert errors(exact * (1 + 1e-3), exact) == pytest.approx((1e-3, 1e-3 * exact.abs().max().item()))


def test_host_time_excludes_products(built):
    with FlopCounterMode(display=False) as counter:
        milliseconds = host_milliseconds(built, shapes.TINY_MODEL, torch.device("cpu"), 2)
    assert milliseconds > 0 and counter.get_total_flops() == 0


def test_host_time_is_of_separate_products_whatever_was_measured_for_small_matrices(built):
    """Shrunk matrices have sizes for which tuning may have found one launch to be faster."""
    pytest.importorskip("triton")
    products, launched = built.kernels.products, []

    def small_polar(X, *arguments, **options):
        launched.append(X.shape)
        return torch.empty_like(X)

    known = {
        products.small_choice: lambda *size: built.kernels.speeds.gains.Gain(2.0, "shipped"),
        products.small_polar.small_polar: small_polar,
    }
    with replaced(built, known):
        host_milliseconds(built, shapes.TINY_MODEL, torch.device("cpu"), 1)
    assert launched == []


def test_replaced_functions_are_restored(built):
    pack = built.kernels.native.momentum_pack_
    with pytest.raises(KeyError), replaced(built, {pack: None.__class__}):
        assert built.rules.momentum.momentum_pack_ is built.kernels.native.momentum_pack_ is not pack
        raise KeyError
    assert built.rules.momentum.momentum_pack_ is built.kernels.native.momentum_pack_ is pack
