"""Laws of the small matrices' Triton kernel for launches of thousands, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import importlib
import math
import sys

import pytest
import torch
from torch import Tensor

from tests.support.small_polynomial import SCALE, SCHEDULE, in_windows, matrices, steps_of

triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = pytest.mark.usefixtures("place")

# Heads x layers of a model, and how many different matrices are among them.
THOUSANDS, DIFFERENT = 2000, 20
STEPS = steps_of(in_windows(SCHEDULE[:1], (1,), SCALE))

# Kernels find by name, among the globals of their module, what they call.
elements_before = None


@pytest.fixture
def module(kernel):
    return importlib.import_module(f"{kernel.__name__}.kernels.gpu.small_polar")


@triton.jit
def _tell_elements_before(told, matrices, width, SQUARES: tl.constexpr, SIDE: tl.constexpr, COUNT: tl.constexpr):
    each = tl.arange(0, COUNT)
    tl.store(told + each, elements_before(tl.load(matrices + each), width, SQUARES, SIDE))


@pytest.mark.every_run
@pytest.mark.parametrize("on_chip", [False, True])
def test_the_longest_matrices_have_their_scratch_behind_each_other(module, tuned, monkeypatch, on_chip):
    """Though squares and matrix together need more than 31 bits. Their numbers are those of thousands in a launch."""
    monkeypatch.setattr(sys.modules[__name__], "elements_before", module.elements_before)
    matrices = torch.tensor([0, 1, 2, 3, 1000, 4095, 2**16, 2**31 - 1])
    for side in tuned.PADDED_SIDES:
        width, squares = -(-module._longest(side) // side) * side, 0 if on_chip else 3 * side**2
        told = torch.zeros_like(matrices)
        _tell_elements_before[(1,)](told, matrices, width, SQUARES=squares, SIDE=side, COUNT=8)
        assert told.tolist() == [matrix * (squares + side * width) for matrix in matrices.tolist()]


def test_each_of_thousands_in_one_launch_has_the_bits_that_it_has_alone(place, module, tuned):
    """Wherever it is in the batch, of which the last ones have offsets of more than 31 bits. In a minute or two."""
    config = tuned.safe_small_config(place.targets(tuned)[0], torch.float16, 3)

    def computed(G: Tensor, C: Tensor) -> Tensor:
        module.launch_small_polar(G, C.fill_(math.nan), STEPS, (SCALE, 0.0, torch.float16), config)
        return C

    G = matrices(DIFFERENT, 3, 5)
    alone = torch.cat([computed(X, torch.empty_like(X, dtype=torch.float16)) for X in G.split(1)])
    assert len(alone.unique(dim=0)) == DIFFERENT
    chosen = torch.randint(DIFFERENT, (THOUSANDS,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    shape, strides = (THOUSANDS, 3, 5), (2**31 // (THOUSANDS - 1) + 1, 5, 1)
    far, C = (place.sparse(2**31 + 2**21).as_strided(shape, strides) for _ in range(2))
    assert torch.equal(computed(far.copy_(G[chosen]), C), alone[chosen])
