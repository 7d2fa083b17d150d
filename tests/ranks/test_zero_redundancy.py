"""torch's ZeroRedundancyOptimizer keeps as many groups as it is given: a mixed one would become two, so it raises."""

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer


def take_step_by_branch(kernel):
    """Return the parameters after a step with a group for each branch; a mixed group is refused."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with pytest.raises(AssertionError, match="number of source and destination parameter groups"):
        ZeroRedundancyOptimizer(model.parameters(), kernel.Muon, lr=0.02)
    groups = kernel.groups_for(model)
    groups = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    optimizer = ZeroRedundancyOptimizer(groups, kernel.Muon, lr=0.02)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_groups_of_one_branch_train_and_mixed_ones_are_refused(pools):
    first, second = pools(2).run(take_step_by_branch)
    assert len(first) == 4 and all(map(torch.equal, first, second))
