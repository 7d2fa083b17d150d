"""Steps that users capture in a CUDA graph: every group asks for it when the optimizer is made."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, set_gradients


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_step_is_captured_only_if_every_group_asks_for_it(kernel, capturing):
    optimizer = kernel.Muon(named_parameters().items(), capturable=True)
    optimizer.add_param_group({"params": [("more.bias", Parameter(torch.ones(4)))], "capturable": False})
    with pytest.raises(RuntimeError, match="only with Muon"):
        optimizer.step()


def test_a_captured_step_reads_no_number_on_the_host_and_reports_nothing(kernel, capturing):
    groups = kernel.Muon(named_parameters().items(), capturable=True).param_groups
    check = kernel.step.capture.check_capture
    check(groups, False)
    with pytest.raises(RuntimeError, match=r"cannot call the report of qk_clip: read metrics\(\)"):
        check(groups, True)
    groups[1]["weight_decay"] = torch.tensor(0.1, device="meta")
    check(groups, False)
    groups[1]["weight_decay"] = torch.tensor(0.1)
    with pytest.raises(RuntimeError, match="on the CPU cannot be read by a captured step"):
        check(groups, False)


@pytest.mark.parametrize("terms", [{}, {(0, 1): None}], ids=["alone", "shared"])
def test_a_step_of_parameters_that_ranks_share_is_not_captured(kernel, capturing, terms):
    refused = pytest.raises(RuntimeError, match="several ranks share cannot be captured") if terms else nullcontext()
    with refused:
        kernel.step.capture.check_captured_plan(SimpleNamespace(terms=terms))


def test_a_captured_step_cannot_be_asked_for_later(kernel):
    """The tracer of torch.compile sets it, where parameters are on a GPU."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    set_gradients(params, 0)
    for action in (optimizer.step, optimizer.explain):
        optimizer.param_groups[0]["capturable"] = True
        action()
        assert optimizer.param_groups[0]["capturable"] is False
