"""A function of a matrix's shape in the place of a named adjustment of its steps."""

import io
import re

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


def test_parts_of_other_shapes_show_their_own_multipliers(kernel):
    """Each different one once, in the order of the parts. `multiplier` is the first matrix's."""

    def multiplier(rows, cols):
        return rows / cols

    fused, square = (Parameter(torch.zeros(shape)) for shape in ((28, 16), (16, 16)))
    groups = [
        {"params": [("qkv.weight", fused)], "split_rows": (4, 20, 4), "use_muon": True},
        {"params": [("up.weight", square)], "split_rows": (8, 8), "use_muon": True},
    ]
    table = kernel.Muon(groups, adjust_lr_fn=multiplier).explain()
    assert [(row.multiplier, row.multipliers) for row in table] == [(0.25, (0.25, 1.25)), (0.5, (0.5,))]
    assert re.search(r"split 4\+20\+4 +3 +0\.25, 1\.25 ", str(table)) and "<td" in table._repr_html_()
    assert re.search(r"split 8\+8 +2 +0\.5 ", str(table)) and ">0.25, 1.25</td>" in table._repr_html_()


def test_the_work_of_a_parameter_is_that_of_all_its_parts(kernel):
    fused, alone = (Parameter(torch.zeros(shape)) for shape in ((48, 16), (16, 16)))
    groups = [
        {"params": [("qkv.weight", fused)], "split_rows": (16, 16, 16), "use_muon": True},
        {"params": [("up.weight", alone)], "use_muon": True},
    ]
    of_three, of_one = (row.flops for row in kernel.Muon(groups).explain())
    assert of_three == 3 * of_one > 0


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


@pytest.mark.parametrize(
    "value", [0.0, -1.0, float("inf"), float("nan"), 10**400, torch.ones(2), torch.ones((), device="meta")], ids=type
)
def test_multiplier_function_must_return_a_positive_number(kernel, value):
    with pytest.raises(ValueError, match="finite number above 0"):
        kernel.Muon(named_parameters().items(), adjust_lr_fn=lambda rows, cols: value)
