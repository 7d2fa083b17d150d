"""Steps over long matrices by the Gram iteration with float32 squares: the bits are those of each matrix alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from tests.support.inside import plan_of

ROWS, COLS, COUNT = 70, 200, 5
SETTINGS = {"lr": 0.1, "ns_dtype": torch.bfloat16, "ns_method": "gram_float32", "weight_decay": 0.0}


def stepped(kernel, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return parameters that began at one, after two steps with these gradients."""
    named = [(f"{i}.weight", Parameter(torch.ones_like(gradient))) for i, gradient in enumerate(gradients)]
    optimizer = kernel.Muon(named, **SETTINGS)
    for _ in range(2):
        for (_, p), gradient in zip(named, gradients):
            p.grad = gradient.clone()
        optimizer.step()
    assert all("gram_float32" in row.kernel for row in optimizer.explain())
    return [p.detach() for _, p in named]


@pytest.fixture(scope="module")
def gradients() -> list[torch.Tensor]:
    drawn = torch.randn(COUNT, ROWS, COLS, generator=torch.Generator().manual_seed(0))
    drawn[1, 10:20] = drawn[1, :, 3] = drawn[2] = 0
    return list(drawn)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_step_gives_each_matrix_the_bits_that_it_gets_alone(kernel, gradients, threads):
    before, expected = torch.get_num_threads(), [stepped(kernel, [gradient])[0] for gradient in gradients]
    torch.set_num_threads(threads)
    try:
        together = stepped(kernel, gradients)
        tall = stepped(kernel, [gradient.mT.contiguous() for gradient in gradients])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, together, expected))
    assert all(torch.equal(a.mT, b) for a, b in zip(tall, expected))


def test_what_has_no_gradient_does_not_move(kernel, gradients):
    """Rows and columns of zeros, and a matrix of zeros."""
    for p, gradient in zip(stepped(kernel, gradients), gradients):
        assert torch.equal(p == 1, gradient == 0)


def test_the_work_is_that_of_the_gram_iteration(kernel):
    optimizer = kernel.Muon([("weight", Parameter(torch.ones(ROWS, COLS)))], **SETTINGS)
    (row,), ((matrix,),) = optimizer.explain().rows, plan_of(optimizer).matrices
    steps, windows = sum(map(len, matrix.iteration.windows)), len(matrix.iteration.windows)
    standard, gram = kernel.iteration.iteration_costs(ROWS, COLS, steps, windows, matrix.iteration.products)
    assert row.flops == gram != standard
