"""The compiled operations find elements whose places need more than 31 bits, as those next to each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Gpu, Interpreter
from tests.support.operation_places import MODELLED, SHIPPED, on_every_place, place_of

FAR = 2**31
# Shape and strides in elements of matrices whose last element lies past FAR elements, along each dimension in turn.
LAYOUTS = {
    "batch": ((2, 5, 7), (FAR, 7, 1)),
    "batch of rows": ((2, 1, 7), (FAR, 7, 1)),
    "rows": ((1, 3, 7), (FAR, FAR // 2, 1)),
    "columns": ((1, 7, 3), (FAR, 1, FAR // 2)),
}
Room = Callable[[], Tensor]

pytestmark = on_every_place(SHIPPED, MODELLED)


@pytest.fixture
def room(device: str, tmp_path: Path) -> Room:
    """Room for so many elements and a few more, which on a CPU takes the pages that are written."""
    place = Gpu() if device == "cuda" else Interpreter(tmp_path)
    return lambda: place.sparse(FAR + 64)


def random(*shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return values.to(torch.get_default_device(), torch.half)


def numbers() -> Tensor:
    """Learning rate, weight decay and multiplier."""
    return torch.tensor([0.02, 0.1, 1.5], dtype=torch.float64, device="cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_may_be_far_apart(native, room, layout):
    shape, strides = LAYOUTS[layout]
    near = [random(*shape, seed=seed) for seed in range(3)]
    far = [room().as_strided(shape, strides).copy_(x) for x in near]
    tensors = []
    for momentum, gradient, packed in (near, far):
        norms, seeds = torch.zeros(4, shape[0], dtype=torch.float64), torch.arange(shape[0])
        native.momentum_pack_([*momentum], [*gradient], packed, 0.9, True, norms=norms[0])
        native.frobenius_norm_(norms[1], packed)
        native.normalize_(gradient, packed, norms[1], 1e-7, 4.0)
        native.descend_([*momentum], gradient, *numbers(), norms=norms[2])
        native.descend_([*momentum], packed, *numbers(), seeds=seeds, norms=norms[3])
        of_rows, quotients = torch.zeros(shape[:2], dtype=torch.float64), torch.zeros(shape)
        native.frobenius_norm_(of_rows, packed)
        native.normalize_(quotients, packed, of_rows, 1e-7, 4.0)
        native.normalize_(packed, packed, of_rows, 1e-7, 4.0)
        tensors.append((momentum, gradient, packed, norms, of_rows, quotients))
    assert all(map(torch.equal, *tensors))


def test_parts_of_a_buffer_may_be_far_apart(native, room):
    gradient, momentum, parts, packed = random(2, 5, 7), random(2, 5, 7, seed=1), random(2, 5, 7), room()
    twin = momentum.clone()
    native.momentum_pack_([*momentum], [*gradient], packed, 0.9, True, offsets=[0, FAR])
    native.momentum_pack_([*twin], [*gradient], parts, 0.9, True)
    assert torch.equal(packed.as_strided(parts.shape, (FAR, 7, 1)), parts)
    native.descend_([*momentum], packed, *numbers(), offsets=[0, FAR])
    native.descend_([*twin], parts, *numbers())
    assert torch.equal(momentum, twin)


@pytest.mark.parametrize("to_buffer", [False, True], ids=["to_matrices", "to_buffer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_may_be_far_apart(native, room, layout, to_buffer):
    """In the matrices, and in the buffer, where columns are next to each other."""
    shape, strides = LAYOUTS[layout]
    matrices, buffer = room().as_strided(shape, strides), room()
    step, row_step = (FAR, shape[2]) if layout == "columns" else strides[:2]
    part = buffer.as_strided(shape, (step, row_step, 1))
    source, target = (matrices, part) if to_buffer else (part, matrices)
    source.copy_(random(*shape))
    for first in {0, shape[0] - 1}:  # all matrices, and the last one by its position
        block = [shape[0] - first, first, 0, 0, *shape[1:], first * step, step, row_step]
        target[first:] = 0
        native.move_blocks_(matrices, buffer, torch.tensor([block], device="cpu"), to_buffer)
        assert torch.equal(source, target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_and_results_of_products_may_be_far_apart(request, native, room, device, layout):
    if device == "cuda" or place_of(request.node) != SHIPPED:
        pytest.skip("these products are computed on a CPU, and CUDA has others")
    shape, strides = LAYOUTS[layout]
    count, m, _ = shape
    apart = (FAR, m, 1) if count > 1 else (FAR, FAR // (m - 1), 1)
    instructions = native.gemm_instructions(torch.bfloat16)
    X, (C, D) = random(*shape).bfloat16(), random(2, count, m, m, seed=1).bfloat16()
    far = [room().view(torch.bfloat16).as_strided(x.shape, at) for x, at in ((X, strides), (C, apart), (D, apart))]
    far[0].copy_(X)
    far[2].copy_(D)
    native.gemm_(C, X, X.mT, D, 1.0, 2.0, True, instructions)
    native.gemm_(far[1], far[0], far[0].mT, far[2], 1.0, 2.0, True, instructions)
    assert torch.equal(far[1], C)
    for x in (X, far[0]) if layout != "columns" else ():  # it takes rows that are runs of memory
        for alone in True, False:
            squares = torch.zeros(2, 1, m, m, dtype=torch.bfloat16)
            native.newton_schulz_(x, *squares, [0.5, -0.1, 0.01], alone, instructions)
    assert torch.equal(far[0], X)
