"""One rank saves alone, or all compare copies, after a step whose result nobody has waited for, as on GPUs."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.support.pieces import mesh_of
from tests.support.refusals import error_of


def errors_of_saves(kernel, method: str) -> dict[str, str | None]:
    """Return the errors of steps, in the second of which `lr` differs, and of a method that rank 0 alone then calls.

    If that sent something, it would meet the messages of rank 1's next step.
    """
    p = nn.Parameter(distribute_tensor(torch.ones(8, 6, dtype=torch.bfloat16), mesh_of((2,)), [Replicate()]))
    optimizer, errors = kernel.Muon([("up.weight", p)], lr=0.1, master_weights="split"), {}
    rates, alone = (0.1, 0.3 if dist.get_rank() else 0.1, 0.1, 0.1), dist.get_rank() == 0
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(kernel.step.agreement.meeting.Meeting, "is_known", False))
        for step, rate in enumerate(rates):
            p.grad, optimizer.param_groups[0]["lr"] = torch.ones_like(p), rate
            errors[f"step {step}"] = error_of(optimizer.step)
            for attempt in "ab" if alone else "":
                errors[f"save {step}{attempt}"] = error_of(getattr(optimizer, method))
    return errors


def errors_around_a_comparison(kernel) -> list[str | None]:
    """Return the errors of a step, of `check_copies` when `lr` differs, and of a step when it does not any more."""
    p = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh_of((2,)), [Replicate()]))
    optimizer, errors = kernel.Muon([("up.weight", p)], lr=0.1), []
    with mock.patch.object(kernel.step.agreement.meeting.Meeting, "is_known", False):
        for act, more in ((optimizer.step, 0), (optimizer.check_copies, dist.get_rank()), (optimizer.step, 0)):
            p.grad, optimizer.param_groups[0]["lr"] = torch.ones_like(p), 0.1 + more
            errors.append(error_of(act))
    return errors


def test_a_difference_that_a_comparison_has_named_is_named_once(pools):
    for before, compared, after in pools(2).run(errors_around_a_comparison):
        assert "'lr': 1.1" in compared and before is after is None


@pytest.mark.parametrize("method", ["state_dict", "master_weights"])
def test_one_rank_may_save_alone_and_hears_once_that_ranks_differed(pools, method):
    """A second call returns what there is; the next step of all ranks tells each of them who differed in what."""
    saving, other = pools(2).run(errors_of_saves, method, agreeing=False)
    assert "the ranks did not take the same last step" in saving["save 1a"] and "up.weight" in saving["save 1a"]
    assert all("'lr': 0.3" in errors["step 2"] for errors in (saving, other))
    raising = {"save 1a", "step 2"}
    assert not any(error for errors in (saving, other) for act, error in errors.items() if act not in raising)
