"""What `tune` and `warmup` take, and what they refuse before anything is measured."""

from __future__ import annotations

import math
import os
import re
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tests.tuning.conftest import BF16


@pytest.mark.parametrize("shape", [(8,), (1, 2, 3, 4), (0, 8), (8, 2.5), ("a", "b"), (8, True)])
def test_shapes_that_are_none_are_refused(kernel, measurements, shape):
    with pytest.raises(ValueError, match="shapes must be a list of"):
        kernel.tune([(8, 8), shape])
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).iterdir())


@pytest.mark.parametrize("shape", [(10**12, 10**12), (2**63, 1), (10**18, 8, 8)], ids=str)
def test_shapes_that_no_memory_holds_are_refused(kernel, measurements, shape):
    with pytest.raises(ValueError, match=re.escape(f"at most {2**59} entries in all, got {shape}")):
        kernel.tune([(8, 8), shape], device="cpu", dtype=BF16)
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).iterdir())


@pytest.mark.parametrize("budget", [10**400, -1, float("nan")], ids=lambda seconds: str(seconds)[:4])
def test_budgets_that_no_clock_reaches_are_refused(kernel, measurements, budget):
    for call in (kernel.tune, lambda shapes, **options: kernel.Muon([Parameter(torch.ones(8, 8))]).warmup(**options)):
        with pytest.raises(ValueError, match=f"budget must be at least 0 seconds, .* got {budget}"):
            call([(8, 8)], budget=budget)
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).iterdir())


@pytest.mark.gpu
def test_a_gpu_that_is_not_here_is_refused(kernel):
    with pytest.raises(ValueError, match="device must be a CPU or a GPU that is here"):
        kernel.tune([(8, 8)], device=f"cuda:{torch.cuda.device_count()}")


def test_numbers_of_numpy_are_sizes(kernel, measurements):
    told = []
    kernel.tune([np.array([24, 40])], dtype=BF16, device="cpu", progress=lambda *said: told.append(said))
    assert told[0][2].startswith("24 x 40 bfloat16")


@pytest.mark.parametrize("wrong", [5, 0, []], ids=str)
def test_progress_is_checked_before_anything_is_measured(kernel, measurements, wrong):
    optimizer = kernel.Muon([Parameter(torch.ones(24, 40))], ns_dtype=BF16)
    for call in (optimizer.warmup, partial(kernel.tune, [(24, 40)], dtype=BF16, device="cpu")):
        with pytest.raises(TypeError, match=rf"progress must be a function .* got {re.escape(str(wrong))}; .* budget="):
            call(progress=wrong)
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).iterdir())


def test_progress_may_be_an_empty_list_that_can_be_called(kernel, measurements, capsys):
    class Log(list):
        def __call__(self, *said):
            self.append(said)

    warmup = kernel.Muon([Parameter(torch.ones(24, 40))], ns_dtype=BF16).warmup
    for call in (warmup, partial(kernel.tune, [(24, 40)], dtype=BF16, device="cpu")):
        log = Log()
        call(progress=log)
        assert log and not capsys.readouterr().out


def test_shapes_that_are_no_list_are_refused(kernel):
    with pytest.raises(TypeError, match=r"shapes must be a list of .*, got 5"):
        kernel.tune(5)


@pytest.mark.parametrize("default", [torch.float16, torch.float64], ids=str)
def test_what_is_measured_by_default_is_what_steps_multiply_float32_matrices_in(kernel, tune, monkeypatch, default):
    """Whatever torch's default dtype is, and on the device that is asked for."""
    asked = []
    monkeypatch.setattr(tune, "_checked_device", torch.device)
    monkeypatch.setattr(tune, "default_work_dtype", lambda G: asked.append((G.dtype, G.device.type)) or BF16)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        kernel.tune([(24, 40)], device="meta", progress=lambda *_: None)
    finally:
        torch.set_default_dtype(before)
    assert asked == [(torch.float32, "meta")]


def test_a_gpu_that_this_build_has_no_code_for_is_refused(kernel, tune, monkeypatch):
    def refused(device):
        raise ValueError(f"no code for {device}")

    monkeypatch.setattr(tune, "check_device", refused)
    with pytest.raises(ValueError, match="no code for cpu"):
        kernel.tune([(24, 40)], device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here_is_refused(kernel):
    with pytest.raises(ValueError, match="device must be a CPU or a GPU that is here"):
        kernel.tune([(8, 8)], device="cuda")


WRONG = {"device": "nope"}, {"device": "mps"}, {"device": "cpu:1"}, {"dtype": torch.complex64}


@pytest.mark.parametrize("wrong", [{"progress": 5}, *WRONG], ids=str)
def test_tune_refuses_arguments_before_it_measures(kernel, measurements, wrong):
    before = measurements.changed()
    with pytest.raises((TypeError, ValueError), match=r"(progress|device|dtype) must be"):
        kernel.tune([(24, 40)], **{"device": "cpu", **wrong})
    assert measurements.changed() == before


@pytest.mark.parametrize(
    "budget, error", [(-1, ValueError), (math.nan, ValueError), ("60", TypeError), (True, TypeError)]
)
def test_a_budget_that_is_none_is_refused(kernel, budget, error):
    for call in (partial(kernel.tune, [(8, 8)]), kernel.Muon([Parameter(torch.ones(8, 8))]).warmup):
        with pytest.raises(error, match="budget"):
            call(budget=budget)


@pytest.mark.parametrize("budget", [np.float32(0.5), math.inf, 0, 10**300], ids=lambda seconds: str(seconds)[:4])
def test_a_budget_may_be_any_time(kernel, budget):
    with warnings.catch_warnings(action="error"):
        kernel.tuning.tune.check_call(budget, None)


def test_a_gpu_without_a_number_is_the_current_one(kernel, tune, monkeypatch):
    """A driver that is too old for torch counts GPUs that torch cannot use."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(tune, "check_device", lambda device: None)
    for available in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        if available:
            devices = [tune._checked_device(device) for device in ("cuda", "cuda:0", None, "cpu")]
            assert devices == [torch.device(name) for name in ("cuda:1", "cuda:0", "cuda:1", "cpu")]
            continue
        assert tune._checked_device(None) == torch.device("cpu")
        with pytest.raises(ValueError, match="device must be a CPU or a GPU that is here, got 'cuda:0'"):
            tune._checked_device("cuda:0")
