"""An error in what QK-clip tells its user changes nothing, and the next step goes on."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.muon.test_clip import muon
from tests.support.small_attention import KINDS
from tests.support.small_model import same_bits


def test_an_error_in_the_report_changes_nothing_and_the_next_step_goes_on(kernel):
    attention, told = copy.deepcopy(KINDS["mha"]), []

    def report(*counts):
        told.append(counts)
        if len(told) == 1:
            raise OSError("the disk of the log is full")

    optimizer = muon(kernel, attention, clip=dict(report=report))
    optimizer.observe_qk_logits("attn", torch.tensor([1.0, 21.0, 22.0, 23.0]))
    optimizer.step()
    before = copy.deepcopy(attention.named)
    with pytest.raises(OSError, match="is full"):
        optimizer.step()
    assert same_bits(attention.named, before)
    optimizer.step()
    assert told == [(3, 0), (3, 0)]


@pytest.mark.filterwarnings("error:qk_clip was given")
def test_a_warning_that_is_an_error_changes_nothing(kernel):
    attention, raised = copy.deepcopy(KINDS["mha"]), 0
    optimizer = muon(kernel, attention)
    for _ in range(12):
        attention.set_gradients(0)
        before = copy.deepcopy(attention.named)
        try:
            optimizer.step()
        except UserWarning:
            raised += 1
            assert same_bits(attention.named, before)
    assert raised == 1
