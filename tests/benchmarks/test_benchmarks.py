"""The benchmarks run, their result files say what was measured, where and of which commit, and the README agrees."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import sweep_bookkeeping, sweep_symmetric_gemm
from benchmarks.built_kernel import load_built
from benchmarks.predicted_step import in_sections
from benchmarks.result_file import UNMEASURED
from benchmarks.timing import rotated
from tests.support.hub_clients import write_variant
from tests.support.tiny_sweeps import run_sweep


@pytest.fixture(scope="module")
def bookkeeping(variant, tmp_path_factory):
    """The results of the tiny sweep."""
    return run_sweep(sweep_bookkeeping.main, variant, tmp_path_factory.mktemp("results") / "bookkeeping.json")


def test_bookkeeping_sweep_measures_both_operations(bookkeeping):
    assert {row["operation"] for row in bookkeeping["results"]} == {"momentum_pack_", "descend_"}
    for row in bookkeeping["results"]:
        assert row["seconds"] > 0 and row["foreach_seconds"] > 0 and row["copy_seconds"] > 0
        assert row["speed_up"] == pytest.approx(row["foreach_seconds"] / row["seconds"])


def test_results_name_the_machine_and_the_commit(bookkeeping, variant):
    built = json.loads((variant / "metadata.json").read_text())["provenance"]["kernel"]
    assert (bookkeeping["commit"], bookkeeping["dirty"]) == (built["commit"], built["dirty"])
    assert bookkeeping["device"] and bookkeeping["threads"] >= 1 and bookkeeping["torch"]


def test_cpu_variant_is_measured_on_cpu_under_cuda_torch(tmp_path, monkeypatch):
    """Such a torch takes no CPU variant that it is not asked to take by name."""
    write_variant(tmp_path / "torch-cpu", "0000002", factor=2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kernel, device = load_built(tmp_path)
    assert (Path(kernel.__file__).parent, device.type) == (tmp_path / "torch-cpu", "cpu")


def test_build_without_a_matching_variant_raises(tmp_path):
    write_variant(tmp_path / "torch-metal", "0000003", factor=2)
    metadata = tmp_path / "torch-metal" / "metadata.json"
    metadata.write_text(metadata.read_text().replace('"cpu"', '"metal"'))
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        load_built(tmp_path)


def linked_results(repository: Path, name: str) -> tuple[str, dict[str, dict]]:
    """Return the README's text, and the results files that it links whose names begin with `name`, by their paths."""
    readme = " ".join((repository / "README.md").read_text().split())
    files = set(re.findall(rf"\((benchmarks/results/{name}-[^)]+\.json)\)", readme))
    return readme, {file: json.loads((repository / file).read_text()) for file in files}


def test_readme_quotes_ranges_of_orthogonalization_from_their_files(repository):
    readme, contents = linked_results(repository, "orthogonalize")
    quoted = re.findall(r"\[([\d.]+ to [\d.]+)\]\((benchmarks/results/orthogonalize[^)]+)\)", readme)
    assert len(quoted) == 4
    for words, file in quoted:
        measured = [row for row in contents[file]["results"] if row["status"] == "measured"]
        quiet = [row["contestants"]["torch products"] for row in measured if "beside busy" not in row["case"]]
        medians = [torchs["ratio"][1] for torchs in quiet]
        assert words == f"{min(medians):.2f} to {max(medians):.2f}"


def test_readme_quotes_adamw_comparison_from_its_file(repository):
    readme, contents = linked_results(repository, "character-model")
    (content,) = contents.values()
    muon, adamw = (content["results"][name]["validation_loss"] for name in ("Muon", "AdamW"))
    for losses in (muon, adamw):
        assert f"{losses['mean']:.3f} ({losses['min']:.3f} to {losses['max']:.3f}" in readme
    assert f"{adamw['mean'] - muon['mean']:.2f} nats per character" in readme
    step, steps = content["muon_matches_adamw_at"]["step"], content["setting"]["final_steps"]
    assert f"after {step:.0f} of {steps} steps" in readme


def product(A, B, out=None, *, spoil):
    """A right symmetric product, spoiled."""
    C = (A.float() @ B.float()).to(A.dtype)
    C = spoil(C.tril() + C.tril(-1).mT)
    return C if out is None else out.copy_(C)


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (lambda C: C, None),
        (lambda C: C * 1.01, "error"),
        (lambda C: C + torch.ones_like(C).triu(1) * 1e-2, "not symmetric"),
        (lambda C: C + len(C) * 1e-2 * torch.eye(C.size(1)), "other bits alone"),
        (lambda C: torch.full_like(C, float("nan")), "error"),
    ],
    ids=["right", "wrong", "asymmetric", "by batch", "not a number"],
)
def test_sweep_proof_finds_wrong_products(spoil, problem):
    X = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0)).half()
    problems = sweep_symmetric_gemm.prove(lambda *args, **options: product(*args, **options, spoil=spoil), X)
    assert problems == [] if problem is None else any(problem in message for message in problems)


@pytest.fixture
def predicted(kernel, monkeypatch):
    """What the sweep predicts on an H200 for a shape that is launched in a configuration, by default the safe one."""
    pytest.importorskip("triton")
    tuned, gpu = kernel.kernels.gpu.tuned, kernel.kernels.speeds.predictions.Gpu(90, 132, 50 * 2**20)
    monkeypatch.setattr(kernel.kernels.speeds.machine, "gpu_of", lambda _: gpu)

    def of(shape, config=None):
        config = config or tuned.safe_config(tuned.HOPPERS, torch.float16, shape[1], True, True)
        monkeypatch.setattr(kernel.kernels.gpu.symmetric_gemm, "chosen_for", lambda *operands: config)
        return sweep_symmetric_gemm.predicted(kernel, torch.empty(shape, dtype=torch.float16, device="meta"))

    return of


@pytest.mark.parametrize("shape", [(7, 2048, 2048), (1, 3072, 3072), (64, 256, 1280)])
def test_sweep_predicts_the_kernel_that_is_chosen(kernel, predicted, shape):
    """In its own number of sections, and below the side from which on Triton's is known, too."""
    model = kernel.kernels.speeds.predictions
    gpu = model.Gpu(90, 132, 50 * 2**20)
    for config in kernel.kernels.gpu.tuned.COMPILED:
        expected = in_sections(model, gpu, shape, config.sections)
        assert predicted(shape, config)["predicted_seconds"] == expected != model.symmetric_seconds(gpu, *shape)
    assert bool(predicted(shape)) == (shape[1] > model.small_side(90))


def test_sweep_predicts_what_the_page_of_predictions_says(repository, predicted):
    page = (repository / "docs/predictions.md").read_text().partition("## H100 SXM, H200")[2]
    for shape in [shape for shape in sweep_symmetric_gemm.SHAPES if shape[1] == shape[2] >= 1024]:
        times = predicted(shape)
        torchs, ours = (f"{1e6 * times[f'predicted_{of}seconds']:.1f}" for of in ("torch_", ""))
        assert f"| {' x '.join(map(str, shape))} | {torchs} | {ours} |" in page


def test_only_the_smallest_squares_fit_into_the_cache():
    """The cache of an H100 holds 50 MiB; the sweep says which operands fit into it."""
    with FakeTensorMode():
        operands = {
            shape: torch.empty(shape, dtype=torch.float16, device="cuda") for shape in sweep_symmetric_gemm.SHAPES
        }
        taken = {shape: len(rotated(X)) * X.nbytes for shape, X in operands.items()}
    assert [shape for shape, size in taken.items() if size <= 50 * 2**20] == [(1, m, m) for m in (128, 256, 512)]


def test_symmetric_gemm_sweep_finds_no_problem_and_keeps_the_rows_that_it_has(variant, tmp_path):
    """A second run measures what the first one left, and nothing else."""
    file = tmp_path / "symmetric.json"
    content = run_sweep(sweep_symmetric_gemm.main, variant, file)
    assert content["results"] and all(row["problems"] == [] and row["gain"] > 0 for row in content["results"])
    kept, cut = content["results"][0], content["results"][1]
    kept["seconds"] = 7.0
    content["results"][1] = {"case": cut["case"], "status": UNMEASURED}
    file.write_text(json.dumps(content))
    rows = {row["case"]: row for row in run_sweep(sweep_symmetric_gemm.main, variant, file)["results"]}
    assert rows[kept["case"]]["seconds"] == 7.0 and rows[cut["case"]]["problems"] == []


@pytest.mark.parametrize("sweep", [sweep_bookkeeping, sweep_symmetric_gemm])
def test_without_time_every_row_stays_unmeasured(variant, tmp_path, sweep):
    rows = run_sweep(sweep.main, variant, tmp_path / "results.json", "--minutes", "0")["results"]
    assert rows and {row["status"] for row in rows} == {UNMEASURED}
