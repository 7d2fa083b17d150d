"""An error in what QK-clip tells its user changes nothing, and the next step goes on; it tells each count once."""

from __future__ import annotations

import copy
from unittest import mock

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


def test_counts_are_reported_once_and_not_after_a_load(kernel):
    """Ranks may disagree after the report; and a load replaces the weights that were clipped."""
    attention, told = copy.deepcopy(KINDS["mha"]), []
    optimizer = muon(kernel, attention, clip=dict(report=lambda *counts: told.append(counts)))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.observe_qk_logits("attn", torch.tensor([1.0, 21.0, 22.0, 23.0]))
    optimizer.step()
    with mock.patch.object(optimizer._agreement, "begin_step", side_effect=RuntimeError("disagree")):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="disagree"):
                optimizer.step()
    assert told == [(3, 0)]
    optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert told == [(3, 0)]


@pytest.mark.parametrize("report", [5, "print", [print]], ids=str)
def test_a_report_that_is_no_function_is_refused_at_once(kernel, report):
    with pytest.raises(TypeError, match=r"report of qk_clip must be a function of two counts, or None, got"):
        muon(kernel, KINDS["mha"], clip=dict(report=report))
    muon(kernel, KINDS["mha"], clip=dict(report=None))


class Sharded(torch.Tensor):
    """What is taken for a DTensor where nothing knows of other processes."""

    full_tensor = torch.Tensor.clone


@pytest.mark.parametrize(
    "layer, logits, error, words",
    [
        (
            "attn",
            torch.ones(4, dtype=torch.complex64),
            TypeError,
            "layer 'attn' must be .* got torch.complex64 in torch.st",
        ),
        ("attn", torch.ones(4, dtype=torch.bool), TypeError, "layer 'attn' must be .* got torch.bool in torch.strided"),
        ("attn", torch.ones(4).to_sparse(), TypeError, "layer 'attn' must be .* got torch.float32 in torch.sparse_coo"),
        (
            "attn",
            torch.ones(4).as_subclass(Sharded),
            TypeError,
            r"layer 'attn' .* got a DTensor: write .full_tensor\(\)",
        ),
        ("attn", ["1.0"], TypeError, r"must be a tensor \(\.\.\., heads\), got list"),
        (["attn"], torch.ones(4), ValueError, r"has no layer \['attn'\], only 'attn'"),
    ],
)
def test_observations_of_another_kind_are_refused_and_change_nothing(kernel, layer, logits, error, words):
    attention = copy.deepcopy(KINDS["mha"])
    optimizer, before = muon(kernel, attention), copy.deepcopy(attention.named)
    with pytest.raises(error, match=words):
        optimizer.observe_qk_logits(layer, logits)
    optimizer.step()
    assert same_bits(attention.named, before) and optimizer.metrics()["heads_not_finite"] == 0


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
