"""AdamW with torch's fused kernel, which for CPUs ignores strides and rounds the end of a tensor in another way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.allocations import Allocations

SETTINGS = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, maximize=False)
MODES = {
    "decay in the kernel": {},
    "decay apart": dict(decay_mode="independent"),
    "cautious": dict(decay_mode="cautious"),
    "decay in a tensor": dict(weight_decay=torch.tensor(0.1)),
}
# Whole vectors of the kernel, of 32 elements at most; two of them and six elements; less than one.
SHAPES = [(8, 16), (7, 10), (3, 5)]
NAMES = ("parameter", "gradient", "average", "square")

any_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
any_mode = pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))

pytestmark = pytest.mark.kernels_ci


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return a parameter, its gradient, and the averages of gradients and of their squares."""
    generator = torch.Generator().manual_seed(0)
    parameter, gradient, average, square = torch.randn(4, *shape, generator=generator).to(dtype)
    return [parameter, gradient, average, square.square()]


def take_step(kernel, *parameters: Sequence[Tensor], **changes) -> None:
    """Take the third step of parameters in place, each given with its other three tensors."""
    rules, steps = kernel.rules.fallback, [torch.tensor(2.0) for _ in parameters]
    tensors = rules.FallbackTensors(*map(list, zip(*parameters)), steps)
    kernel.rules.adamw.adamw_(tensors, rules.FallbackRule(**{**SETTINGS, **changes}))


@any_mode
@any_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("turned", [*NAMES, "all"])
def test_strides_do_not_matter(kernel, turned, shape, dtype, mode):
    plain = drawn(shape, dtype)
    other = [t.mT.contiguous().mT if turned in (name, "all") else t.clone() for name, t in zip(NAMES, plain)]
    take_step(kernel, plain, **mode)
    take_step(kernel, other, **mode)
    assert all(map(torch.equal, other, plain)) and not torch.equal(plain[0], drawn(shape, dtype)[0])


@any_mode
@any_dtype
@pytest.mark.parametrize("cut", [lambda t: t.split((3, 37), 1), lambda t: t.view(-1).split((1, 70, 289))])
def test_parts_get_the_bits_of_the_whole(kernel, cut, dtype, mode):
    """However shards are cut: here into columns, with gaps between their rows, and into runs of elements."""
    whole, in_parts = drawn((9, 40), dtype), drawn((9, 40), dtype)
    take_step(kernel, whole, **mode)
    take_step(kernel, *zip(*map(cut, in_parts)), **mode)
    assert all(map(torch.equal, in_parts, whole))


@any_dtype
def test_cautious_decay_in_pieces_has_the_bits_of_the_whole(kernel, monkeypatch, dtype):
    """Of parameters that fill several pieces, a part of one, and none."""
    results = []
    for most in (kernel.rules.adamw.CAUTIOUS_AT_ONCE, 64):
        monkeypatch.setattr(kernel.rules.adamw, "CAUTIOUS_AT_ONCE", most)
        tensors = [drawn(shape, dtype) for shape in [(400, 100), (7, 10), (3, 5), (0, 4)]]
        take_step(kernel, *tensors, decay_mode="cautious")
        results.append([t for each in tensors for t in each])
    assert all(map(torch.equal, *results))


def test_cautious_decay_copies_a_bounded_part_at_a_time(kernel, monkeypatch):
    """However many elements, and parameters, there are."""
    monkeypatch.setattr(kernel.rules.adamw, "CAUTIOUS_AT_ONCE", 1 << 12)
    peaks = []
    for shapes in ([(1024, 16)], [(2048, 16)], [(128, 16)] * 16):
        tensors = [drawn(shape, torch.float32) for shape in shapes]
        with Allocations() as memory:
            take_step(kernel, *tensors, decay_mode="cautious")
        peaks.append(memory.peak)
    # The parameter before the step, the decay of each element, and two masks: whether it applies, and not.
    assert max(peaks) <= (10 << 12) + 200


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_gradients_stay_scaled_and_an_overflow_counts_no_step(kernel, overflow):
    """torch's kernel writes the unscaled gradients back."""
    tensors = drawn((7, 10), torch.float32)
    before = [t.clone() for t in tensors]
    scaling = kernel.rules.scaling.GradientScaling(torch.tensor([8.0]), torch.tensor([overflow]))
    rules, steps = kernel.rules.fallback, [torch.tensor(2.0)]
    kernel.rules.adamw.adamw_(
        rules.FallbackTensors(*([t] for t in tensors), steps), rules.FallbackRule(**SETTINGS), scaling
    )
    assert torch.equal(tensors[1], before[1]) and steps[0] == 3 - overflow
    assert torch.equal(tensors[0], before[0]) == bool(overflow)
