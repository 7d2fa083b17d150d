"""A message that fails, as when a rank has died: the error says who waited, for what and of which parameters.

Here all_reduce and all_to_all_single fail in one process, which is rank 0.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

CPU = torch.device("cpu")


def broken(*_, **__):
    raise RuntimeError("it was closed")


def of_chunk(step):
    """Return a chunk's transfer of two elements."""
    return step.sharded._exchanged(SimpleNamespace(names="up.weight"), torch.zeros(2), [2], [2], None)


def of_sum(step):
    """Return a sum of parts."""
    work = SimpleNamespace(batch=SimpleNamespace(names="up.weight"))
    return step.gram_sums._summed_(iter([torch.zeros(2)]), work, None)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("module, transfer", [("sharded", of_chunk), ("gram_sums", of_sum)])
def test_a_message_of_parts_that_fails_names_them(kernel, monkeypatch, module, transfer, at_once):
    pending = SimpleNamespace(wait=broken)
    send = broken if at_once else lambda *_, **__: pending
    sending = SimpleNamespace(all_to_all_single=send, all_reduce=send)
    monkeypatch.setattr(getattr(kernel.step, module), "dist", sending)
    with pytest.raises(RuntimeError, match=r"rank 0 failed while it waited .* parts of up\.weight: .*it was closed"):
        list(transfer(kernel.step))


@pytest.mark.parametrize("number", range(4), ids=["columns go", "norms", "Gram matrices", "columns come"])
def test_each_message_of_a_team_that_fails_names_its_matrix(kernel, monkeypatch, number):
    schedule, numbers = kernel.schedules.resolve_schedule("polar_express", 5), itertools.count()
    iteration = kernel.iteration.summed_iteration(CPU, torch.float32, (4, 6), schedule, "gram_float32")
    assert len(iteration.windows) == 1
    matrix = SimpleNamespace(parameter=SimpleNamespace(name="up.weight", device=CPU), iteration=iteration)
    batch = SimpleNamespace(packed_shape=(4, 6), packed_dtype=torch.float32, first=matrix)
    team = kernel.plan.teams.Team(batch, (0,), 0, (6,))

    def send(received, *sent, **_):
        if next(numbers) == number:
            broken()
        received.copy_(sent[0] if sent else received)

    monkeypatch.setattr(kernel.step.team, "dist", SimpleNamespace(all_to_all_single=send, all_reduce=send))
    with pytest.raises(RuntimeError, match=r"rank 0 failed while it waited .* columns of up\.weight: .*it was closed"):
        kernel.step.team.team_factor(team, torch.ones(1, 4, 6), 1e-7, None)
