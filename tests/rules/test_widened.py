"""Wider copies of tensors: a part of the parameters at a time, with the bits of all at once."""

import pytest
import torch

from tests.support.allocations import Allocations

SETTINGS = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, maximize=False)
# Of 30 elements at once: rows that are longer, also before all others, or fill no part, and tensors without a row.
SHAPES = [(3, 70), (40, 12), (35,), (4, 3, 5), (), (0, 8)]
AT_ONCE = 30
BYTES = {"adamw": 17, "nadamw": 20}  # of an element, at most

any_update = pytest.mark.parametrize("update", ["adamw", "nadamw"])


def drawn(kernel, shapes, dtype, gradients, remainders=False):
    """Tensors of parameters that have taken 2 steps, and the lower halves of their masters, if they have these."""
    generator = torch.Generator().manual_seed(0)
    columns = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(5)]
    parameters, gradient, averages, squares, rest = columns
    state = torch.float32 if remainders else dtype
    tensors = kernel.rules.fallback.FallbackTensors(
        [p.to(dtype) for p in parameters],
        [g.to(gradients) for g in gradient],
        [m.to(state) for m in averages],
        [v.square().to(state) for v in squares],
        [torch.tensor(2.0) for _ in shapes],
    )
    return tensors, [(1000 * r).to(torch.int16) for r in rest] if remainders else None


def take_step(kernel, update, tensors, remainders=None, scaling=(None, None)):
    step = kernel.rules.fallback_table.FALLBACKS[update].update
    rule = kernel.rules.fallback.FallbackRule(**SETTINGS)
    kernel.rules.widened.update_widened_(
        step, tensors, rule, kernel.rules.scaling.GradientScaling(*scaling), remainders
    )
    return [t for column in (*tensors, remainders or ()) for t in column]


@any_update
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16, True)],
    ids=str,
)
def test_parts_have_the_bits_of_whole_parameters(kernel, monkeypatch, update, found_inf, dtypes):
    """And each parameter has taken one step, or none if gradients overflow."""
    scaling = (None, None) if found_inf is None else (torch.tensor([4.0]), torch.tensor([found_inf]))
    whole = take_step(kernel, update, *drawn(kernel, SHAPES, *dtypes), scaling)
    monkeypatch.setattr(kernel.rules.widened, "WIDENED_AT_ONCE", AT_ONCE)
    tensors, remainders = drawn(kernel, SHAPES, *dtypes)
    assert all(map(torch.equal, take_step(kernel, update, tensors, remainders, scaling), whole))
    assert {float(step) for step in tensors.steps} == {2.0 if found_inf else 3.0}


@pytest.mark.parametrize("scaling", [(None, None), (torch.tensor([4.0]), torch.tensor([0.0]))], ids=["plain", "scaled"])
@pytest.mark.parametrize("update, most", BYTES.items())
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32], ids=str)
def test_the_memory_of_copies_is_that_of_the_page(kernel, monkeypatch, update, most, gradients, scaling):
    """However many rows a parameter with masters has. A part has some numbers beside its elements."""
    monkeypatch.setattr(kernel.rules.widened, "WIDENED_AT_ONCE", 1 << 12)
    peaks = []
    for rows in (1024, 2048):
        tensors, rest = drawn(kernel, [(rows, 16)], torch.bfloat16, gradients, remainders=True)
        with Allocations() as memory:
            take_step(kernel, update, tensors, rest, scaling)
        peaks.append(memory.peak)
    assert peaks[0] == peaks[1] <= (most << 12) + 200


@pytest.mark.parametrize("scaling, copies", [((None, None), 1), ((torch.tensor([4.0]), torch.tensor([0.0])), 3)])
def test_nadamw_copies_a_part_of_its_averages_at_a_time(kernel, monkeypatch, scaling, copies):
    """With the bits of whole ones. Under a scale there are unscaled gradients, too, and what averages become."""
    nadamw_, scaling = kernel.rules.nadamw.nadamw_, kernel.rules.scaling.GradientScaling(*scaling)
    rule, peaks, results = kernel.rules.fallback.FallbackRule(**SETTINGS), [], []
    for at_once in (1 << 20, 1 << 12):
        monkeypatch.setattr(kernel.rules.widened, "WIDENED_AT_ONCE", at_once)
        tensors, _ = drawn(kernel, [(1024, 16), (1024, 16)], torch.float32, torch.float32)
        with Allocations() as memory:
            nadamw_(tensors, rule, scaling)
        peaks.append(memory.peak)
        results.append([t for column in tensors for t in column])
    assert all(map(torch.equal, *results))
    assert peaks[1] <= 4 * copies * (1 << 12) + 200 < peaks[0]


def test_the_page_says_so(repository):
    page = (repository / "docs/master_weights.md").read_text()
    assert "at most {adamw} bytes an element (NAdamW: {nadamw}) of 2^25 elements".format(**BYTES) in page
