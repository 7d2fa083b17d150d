"""Candidates that hang or end their process: they are named, and the next process leaves them out."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.support.rank_pool import load_kernel

CPU = torch.device("cpu")


@pytest.fixture
def need(kernel):
    return kernel.kernels.measurement_file.Need("cpu_products", "bfloat16", 24, 40)


def try_for_long(variants: str, started) -> None:
    kernel = load_kernel(Path(variants), None)
    need = kernel.kernels.measurement_file.Need("cpu_products", "bfloat16", 24, 40)
    with kernel.kernels.trials.trial(kernel.kernels.machine.key_of(CPU), need, "NATIVE"):
        started.set()
        time.sleep(600)


def test_what_hung_is_left_out_by_the_next_process(kernel, measurements):
    """While the process lives, it only tries."""
    key, context = kernel.kernels.machine.key_of(CPU), multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=try_for_long, args=(str(Path(kernel.__file__).parents[1]), started))
    process.start()
    assert started.wait(120)
    assert not measurements.failed(key, "cpu_products", "bfloat16")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    for _ in range(2):  # the mark goes, what it said stays
        measurements.forget()
        assert "did not come to its end" in measurements.failed(key, "cpu_products", "bfloat16")["NATIVE"]
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.trial"))


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_trial_that_ends_leaves_no_mark(kernel, measurements, need, error):
    key = kernel.kernels.machine.key_of(CPU)
    with pytest.raises(error) if error else contextlib.nullcontext():
        with kernel.kernels.trials.trial(key, need, "NATIVE"):
            assert len(list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.trial"))) == 1
            if error:
                raise error
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.trial"))


def test_a_candidate_that_takes_long_is_named(kernel, measurements, need, monkeypatch):
    trials = kernel.kernels.trials
    told = []
    monkeypatch.setattr(trials, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(trials.warnings, "warn", lambda text, *_, **__: told.append(text))
    with trials.trial(kernel.kernels.machine.key_of(CPU), need, "NATIVE"):
        time.sleep(0.2)
    assert len(told) == 1 and "NATIVE" in told[0] and "the next one leaves this candidate out" in told[0]
