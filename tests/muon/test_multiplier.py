"""A function of a matrix's shape in the place of a named adjustment of its steps."""

import io

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import matrix, named_parameters


def test_multiplier_may_be_a_function_of_the_shape(kernel):
    shapes = []

    def adjustment(rows, cols):
        shapes.append((rows, cols))
        return 0.5

    p, q = (Parameter(torch.zeros(24, 12)) for _ in range(2))
    optimizer = kernel.Muon([p], lr=0.1, adjust_lr_fn=adjustment)
    constant = kernel.Muon([q], lr=0.05, adjust_lr_fn=lambda rows, cols: 1.0)
    p.grad = q.grad = matrix(24, 12, 0)
    optimizer.step()
    constant.step()
    assert set(shapes) == {(24, 12)} and optimizer.explain().rows[0].multiplier == 0.5
    assert torch.equal(p, q)


def test_multiplier_function_is_not_saved_but_needed_to_load(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), adjust_lr_fn=lambda rows, cols: 0.5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = kernel.Muon(named_parameters().items(), adjust_lr_fn=lambda rows, cols: 0.25)
    other.load_state_dict(saved)
    assert other.explain().rows[0].multiplier == 0.25
    with pytest.raises(ValueError, match="was a function when the state was saved, and is original here"):
        kernel.Muon(named_parameters().items(), adjust_lr_fn="original").load_state_dict(saved)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_multiplier_function_must_return_a_positive_number(kernel, value):
    with pytest.raises(ValueError, match="finite number above 0"):
        kernel.Muon(named_parameters().items(), adjust_lr_fn=lambda rows, cols: value)
