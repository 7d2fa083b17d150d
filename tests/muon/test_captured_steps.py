"""Steps that users capture in a CUDA graph: every group asks for it when the optimizer is made."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, set_gradients


def test_a_step_is_captured_only_if_every_group_asks_for_it(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    optimizer = kernel.Muon(named_parameters().items(), capturable=True)
    optimizer.add_param_group({"params": [("more.bias", Parameter(torch.ones(4)))], "capturable": False})
    with pytest.raises(RuntimeError, match="only with Muon"):
        optimizer.step()


def test_a_captured_step_cannot_be_asked_for_later(kernel):
    """The tracer of torch.compile sets it, where parameters are on a GPU."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    set_gradients(params, 0)
    for action in (optimizer.step, optimizer.explain):
        optimizer.param_groups[0]["capturable"] = True
        action()
        assert optimizer.param_groups[0]["capturable"] is False
