"""What users should decide is said once, with what to write, and not where all is well."""

import copy
import warnings

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters

pytestmark = pytest.mark.kernels_ci


def parameters(**shapes):
    return [(name.replace("__", "."), Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


def warned(make):
    """What `make` warns of, and what it returns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    assert all(warning.category is UserWarning and warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught], made


def test_an_ordinary_model_needs_no_advice(kernel):
    lines, optimizer = warned(lambda: kernel.Muon(named_parameters().items()))
    assert lines == [] and optimizer.explain().notes == []


def test_one_warning_names_what_may_be_stacks(kernel):
    params = parameters(up=(64, 64), a__w=(8, 16, 12), b__w=(8, 16, 24))
    (line,), optimizer = warned(lambda: kernel.Muon(params))
    assert line.startswith(
        "2 parameters (4,608 elements), such as b.w (8, 16, 24): stacks of matrices, or convolutions?"
    )
    for cure in ("expert_keys=", "stacked=True", "stacked=False", "use_muon=False"):
        assert cure in line
    assert optimizer.explain().notes == kernel.route(params).notes == [line]


@pytest.mark.parametrize(
    "cure", [dict(expert_keys=("w",)), dict(stacked=True), dict(stacked=False), dict(use_muon=False)], ids=str
)
def test_each_cure_ends_the_warning(kernel, cure):
    params = [{"params": parameters(a__w=(8, 16, 12)), **cure}, {"params": parameters(up=(64, 64))}]
    assert warned(lambda: kernel.Muon(params))[0] == []


def test_a_group_that_is_added_is_judged_alone(kernel):
    lines, optimizer = warned(lambda: kernel.Muon(parameters(up=(64, 64), a__w=(8, 16, 12))))
    assert len(lines) == 1
    assert warned(lambda: optimizer.add_param_group({"params": parameters(down=(64, 64))}))[0] == []
    (line,), _ = warned(lambda: optimizer.add_param_group({"params": parameters(b__w=(8, 16, 12))}))
    assert line.startswith("b.w (8, 16, 12): stacks")
    assert warned(lambda: copy.deepcopy(optimizer))[0] == []
