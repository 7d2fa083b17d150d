"""The real classes of families of transformers, randomly initialised and tiny, against tables made by hand.

`make test-integrations` installs what this needs, in a folder of its own.
"""

import warnings

import pytest
import torch

from tests.support.model_of_many_kinds import chosen
from tests.support.small_model import take_steps
from tests.support.transformers_families import FAMILIES

pytestmark = pytest.mark.integrations


@pytest.fixture(params=FAMILIES)
def family(request, transformers):
    torch.manual_seed(0)
    return FAMILIES[request.param].make(transformers), FAMILIES[request.param].weights


def line_of(weights, name):
    """The line of a table that ends the name; each name has one."""
    (entry,) = [line for end, line in weights.items() if f".{name}".endswith(end)]
    return entry


def test_each_weight_is_what_the_table_says(kernel, family):
    """And each line of the table is that of some weight."""
    model, weights = family
    kinds = chosen(kernel.groups_for(model))
    assert kinds.keys() == dict(model.named_parameters()).keys()
    vectors = {name for name, p in model.named_parameters() if sum(size > 1 for size in p.shape) < 2}
    expected = {name: "vector" if name in vectors else line_of(weights, name) for name in kinds}
    assert kinds == expected
    assert all(any(f".{name}".endswith(end) for name in kinds.keys() - vectors) for end in weights)


def test_groups_step_without_a_warning(kernel, family):
    """And the optimizer explains what was chosen."""
    model, _ = family
    groups = kernel.groups_for(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = kernel.Muon(groups, lr=0.01)
    assert {row.name: row.reason for row in optimizer.explain().rows} == chosen(groups)
    named = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    take_steps(optimizer, named, range(2))
    assert all(p.isfinite().all() and not torch.equal(p, before[name]) for name, p in named.items())


def test_names_alone_give_the_same_branches(kernel, family):
    """Without a model: what is Muon's is Muon's, stacks are stacks, and nothing is left to ask."""
    model, _ = family
    by_model = kernel.groups_for(model).choices.rows
    by_name = kernel.route(model.named_parameters(remove_duplicate=False))
    assert [(row.name, row.branch) for row in by_name.rows] == [(row.name, row.branch) for row in by_model]
    stacks = [row for row in by_name.rows if len(row.shape) == 3 and row.branch == "muon"]
    assert all(row.matrices == row.shape[0] for row in stacks) and by_name.notes == []
