"""What a step costs Python: it walks the plan by lists, so more parameters in a batch call no more functions."""

from __future__ import annotations

import gc
import sys
from types import FrameType

import pytest
import torch
from torch.nn import Parameter

SHAPES = [(12, 20), (24, 8), (64,)]  # AdamW's kernel for CPUs takes whole vectors of 64 together


def calls_of_a_step(kernel, times: int, **settings) -> int:
    """Return how many Python functions a step calls, whose plan was made before, with so many parameters of a shape."""
    params = [(f"{i}.weight", Parameter(torch.ones(shape))) for i, shape in enumerate(SHAPES * times)]
    optimizer, calls = kernel.Muon(params, lr=0.01, cuda_graphs=False, **settings), []

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code)

    for step in range(4):
        for _, p in params:
            p.grad = torch.ones_like(p)
        if step == 3:
            gc.disable()  # what it collects may call functions of its own
            sys.setprofile(count)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
            gc.enable()
    return len(calls)


@pytest.mark.parametrize(
    "settings",
    [{}, {"fallback": "nadamw"}, {"maximize": True}, {"equalize": "columns", "renormalize": "rows"}],
    ids=str,
)
def test_more_parameters_in_a_batch_call_no_more_functions(kernel, one_thread, settings):
    assert calls_of_a_step(kernel, 8, **settings) == calls_of_a_step(kernel, 2, **settings)


@pytest.mark.parametrize(
    "settings", [{"second_moment": "rows"}, {"momentum_dtype": "int8"}, {"release_grads": True}], ids=str
)
def test_state_and_gradients_that_are_looked_up_for_each_call_few(kernel, one_thread, settings):
    """At most four functions for each of the twelve matrices more."""
    more = calls_of_a_step(kernel, 8, **settings) - calls_of_a_step(kernel, 2, **settings)
    assert 0 < more <= 4 * 12
